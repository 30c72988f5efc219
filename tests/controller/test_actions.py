"""The five pages against a box that refuses whatever it was not told about."""

from dataclasses import replace

import pytest

from controller.actions import kill, setup_and_train, setup_only, status, tail_log
from controller.inputs import check_inputs
from controller.job import Job
from controller.objects import DialogSource
from controller.reports import StepsReport
from controller.settings import Settings
from controller.summary import as_markdown
from corpus_builder.errors import Named, ProjectError
from corpus_builder.manifest import manifest_to_json
from corpus_builder.say import SEE_PUBLIC, error_lines
from tests.fake_box import FakeBox
from tests.manifests import small_manifest

MODEL = {"exists": True, "config": True, "tokenizer": True, "missing": []}
FACTS = {
    "python": "3.10.1", "tmux": "3.3a", "gpus": None, "disks": {}, "release_present": False, "dialog": {"exists": True},
    "dialog_archive": False, "locks": {"setup": None, "run": None}, "base_model": MODEL,
}  # fmt: skip
RUN_LOCK = {"owner": "bob", "action": "setup-and-train", "name": "20260101-000000-aaaa"}
STATUS = {
    "run": None, "setup": None, "checkpoints": [], "gpus": None, "disks": {}, "secrets": [],
    "locks": {"setup": None, "run": None},
}  # fmt: skip


def step(state, *lines, offset=10, **more):
    return {"id": "s-1", "state": state, "outcome": None, "error": None, "lines": list(lines), "next_offset": offset,
            "progress": None, "progress_count": 0, "eta_s": None, **more}  # fmt: skip


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.naps = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.naps.append(seconds)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def job(tmp_path, clock):
    return make_job(tmp_path, clock)


def make_job(tmp_path, clock, action="setup-and-train", shown=None, settings=None, **given):
    (tmp_path / "docs").mkdir(exist_ok=True)
    return Job(
        settings=Settings.from_environment(settings or {}),
        inputs=check_inputs({"action": action, **given}, repo_root=tmp_path),
        environ={}, owner="alice", commit="c0ffee", run_url="https://gh/runs/7", lang="en", sees="public",
        echo=(shown if shown is not None else []).append, clock=clock, sleep=clock.sleep,
        utc_now=lambda: "20260503-101500",
    )  # fmt: skip


def box_for_setup(*follow, facts=FACTS, manifest=None, **answers):
    packed = manifest_to_json(manifest or small_manifest())
    return FakeBox(
        {
            "facts": [facts],
            "receive_release": [{"digest": "d", "files": 1, "kept": []}],
            "start_setup": [{"setup_id": "s-1", "attached": False}],
            "follow": list(follow) or [step("succeeded")],
            "manifest": [{"manifest": packed}],
            **answers,
        }
    )


def test_setup_only_sends_starts_follows_and_counts(tmp_path, clock):
    shown = []
    box = box_for_setup(step("running", "[soul] one", offset=5), step("succeeded", "[soul] two"), step("succeeded"))
    report = setup_only.run(box, make_job(tmp_path, clock, "setup-only", shown))
    assert box.operations == ["facts", "receive_release", "start_setup", "follow", "follow", "follow", "manifest"]
    assert shown == ["[soul] one", "[soul] two"]
    assert (report.state, report.error, report.manifest.total_samples) == ("succeeded", None, 5)
    assert box.streamed["receive_release"][:2] == b"\x1f\x8b"  # gzip


def test_setup_only_tells_who_asked_and_hands_no_secret_but_the_link(tmp_path, clock):
    link = "https://h/dialog.zip?sign=0123456789"
    masked = []
    job = replace(make_job(tmp_path, clock, settings={"ZY_BINGSHUO_DIALOG_URL": link}), mask=masked.append)
    box = box_for_setup()
    setup_only.run(box, job)
    request = dict(box.asked)["start_setup"]
    assert (request["owner"], request["commit"], request["run_url"]) == ("alice", "c0ffee", "https://gh/runs/7")
    assert (request["dialog"], request["secrets"]) == ({"kind": "url", "fresh": False}, {"ZY_DIALOG_URL": link})
    assert link in masked
    assert request["setup_id"].startswith("20260503-101500-")


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("https://h/a.zip", ["10.0.0.1"]),
        ("http://10.0.0.1/a.zip", ["10.0.0.1", "10.0.0.1:80"]),
        ("http://10.0.0.1:9000/a.zip", ["10.0.0.1", "10.0.0.1:9000"]),
    ],
)
def test_plain_http_is_allowed_for_that_link_alone(link, expected):
    source = DialogSource("url", "link", url=link)
    assert setup_only.allowed_hosts(("10.0.0.1",), source) == expected


def test_setup_only_sends_nothing_that_is_there_already(tmp_path, clock):
    box = box_for_setup(facts={**FACTS, "release_present": True})
    setup_only.run(box, make_job(tmp_path, clock))
    assert "receive_release" not in box.operations


def test_dry_run_asks_and_changes_nothing(tmp_path, clock):
    box = FakeBox({"facts": [FACTS]})
    report = setup_and_train.run(box, replace(make_job(tmp_path, clock), is_dry_run=True))
    assert isinstance(report, StepsReport)
    assert [item.key for item in report.steps] == [
        "push_release", "fetch_dialogs", "environment", "smoke", "build_corpus", "start_run",
    ]  # fmt: skip
    assert box.operations == ["facts"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"exists": False, "config": False, "tokenizer": False}, "base_model_missing"),
        ({"config": False}, "base_model_no_config"),
        ({"missing": ["model-00002.safetensors"]}, "base_model_incomplete"),
        ({"tokenizer": False}, "tokenizer_missing"),
        ({"adapter": True}, "base_model_is_adapter"),
    ],
)
def test_unfit_base_model_ends_it_before_anything_is_sent(job, change, code):
    box = FakeBox({"facts": [{**FACTS, "base_model": {**MODEL, **change}}]})
    with pytest.raises(ProjectError, match=code):
        setup_only.run(box, job)
    assert box.operations == ["facts"]


def test_missing_dialog_zip_ends_it_before_anything_is_sent(job):
    box = FakeBox({"facts": [{**FACTS, "dialog": {"exists": False}}]})
    with pytest.raises(ProjectError, match="dialog_zip_missing"):
        setup_only.run(box, job)
    assert dict(box.asked)["facts"]["dialog_path"] == "~/bingshuo-dialog.zip"


def test_gate_that_stops_is_reported_with_the_counts(job):
    gate = ProjectError("gate_failed", gates="total (5 < 100)").to_json()
    box = box_for_setup(step("failed", error=gate), step("failed", error=gate))
    report = setup_only.run(box, job)
    assert (report.error.code, report.error.exit_code) == ("gate_failed", 7)
    assert report.manifest.total_samples == 5


def test_setup_that_fails_elsewhere_shows_no_earlier_corpus(job):
    told = ProjectError("dialog_zip_unreadable", path=Named("a.zip"), reason="x").to_json()
    report = setup_only.run(box_for_setup(step("failed", error=told)), job)
    assert (report.error.code, report.manifest) == ("dialog_zip_unreadable", None)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (step("lost"), "session_vanished"),
        (step("failed", outcome={"exit_code": 9, "reason": "environment"}), "setup_failed"),
        (step("killed", outcome={"exit_code": None, "reason": "stopped"}), "setup_failed"),
    ],
)
def test_setup_without_a_told_error_says_what_is_known(job, answer, code):
    assert setup_only.run(box_for_setup(answer), job).error.code == code


def test_setup_that_fails_says_the_known_remedy(tmp_path, clock):
    told = ProjectError("smoke_failed", path="/venv/bin/python", reason=Named("RuntimeError: x")).to_json()
    outcome = {"exit_code": 4, "reason": "step smoke ended with exit code 4", "remedy": "driver_too_old"}
    failed = step("failed", error=told, outcome=outcome)
    only = setup_only.run(box_for_setup(failed), make_job(tmp_path, clock))
    assert (only.error.code, only.error.exit_code, only.remedy) == ("smoke_failed", 4, "driver_too_old")
    both = setup_and_train.run(box_for_setup(failed), confirmed(tmp_path, clock))
    assert (both.error.code, both.remedy) == ("smoke_failed", "driver_too_old")
    assert setup_only.run(box_for_setup(step("succeeded", outcome=outcome)), make_job(tmp_path, clock)).remedy is None


def test_what_may_trouble_a_run_is_in_the_report_of_a_setup(tmp_path, clock):
    health = {"shm": {"free_gib": 0.06, "total_gib": 0.06}, "time": 1777803300.0 + 3600}
    box = training_box(step("succeeded"), facts={**FACTS, "health": health})
    report = setup_and_train.run(box, confirmed(tmp_path, clock))
    assert [notice.key for notice in report.setup.notices] == ["shm_small", "clock_off"]
    assert report.setup.notices[1].values == {"minutes": 60}
    assert report.setup.box == {"python": "3.10.1", "tmux": "3.3a", "gpus": None, "health": health}


@pytest.mark.parametrize(("setting", "allowed"), [({}, False), ({"ZY_ALLOW_INSTALL": "yes"}, True)])
def test_tmux_is_installed_only_where_the_setting_lets_us(tmp_path, clock, setting, allowed):
    box = box_for_setup()
    setup_only.run(box, make_job(tmp_path, clock, settings=setting))
    assert dict(box.asked)["start_setup"]["allow_install"] is allowed
    dry = replace(make_job(tmp_path, clock, settings=setting), is_dry_run=True)
    steps = setup_only.run(FakeBox({"facts": [{**FACTS, "tmux": None}]}), dry).steps
    assert [item.is_needed for item in steps if item.key == "install_tmux"] == [allowed]


def test_not_confirmed_touches_nothing(job):
    box = FakeBox({})
    with pytest.raises(ProjectError) as caught:
        setup_and_train.run(box, job)
    assert (caught.value.code, caught.value.exit_code, box.asked) == ("not_confirmed", 8, [])


def test_run_at_work_is_named_before_anything_is_sent(tmp_path, clock):
    box = FakeBox({"facts": [{**FACTS, "locks": {"setup": None, "run": RUN_LOCK}}]})
    with pytest.raises(ProjectError) as caught:
        setup_and_train.run(box, make_job(tmp_path, clock, confirm_override="true"))
    assert (caught.value.exit_code, caught.value.values["name"]) == (8, "20260101-000000-aaaa")


PREFLIGHT = (
    "ZY_EVENT name=preflight gpu_gib=9.8 host_gib=147.3 disk_gib=410 steps=130 views=5 minutes=unknown basis=unknown"
)
PROGRESS = "ZY_PROGRESS step=5 total=10 loss=2.5 lr=1e-05 epoch=0.5 total_epochs=1 thr=3 loss_soul=2"


def training_box(*follow, **answers):
    return box_for_setup(
        step("succeeded"), step("succeeded"), *follow,
        start_train=[{"run_id": "r-1"}], status=[{**STATUS, "checkpoints": [{"path": "final", "complete": True}]}],
        **answers,
    )  # fmt: skip


def confirmed(tmp_path, clock, **given):
    return make_job(tmp_path, clock, confirm_override="true", **given)


def test_training_is_watched_to_its_end(tmp_path, clock):
    box = training_box(step("running", PREFLIGHT, PROGRESS, offset=20), step("succeeded", offset=20))
    report = setup_and_train.run(box, confirmed(tmp_path, clock))
    assert (report.preflight["host_gib"], report.preflight["steps"]) == ("147.3", "130")
    assert (report.state, report.error, report.run_id) == ("succeeded", None, "r-1")
    assert [(point.step, point.loss) for point in report.points] == [(5, 2.5)]
    assert report.checkpoints[0]["path"] == "final"


def test_training_gets_the_resolved_recipe_and_its_origins(tmp_path, clock):
    box = training_box(step("succeeded"))
    setup_and_train.run(box, confirmed(tmp_path, clock, base_model_dir="/models/mother"))
    request = dict(box.asked)["start_train"]
    assert request["recipe"]["base_model_dir"] == "/models/mother"
    assert request["origins"] == {"base_model_dir": "input"}
    assert (request["version"], request["action"], request["grace_s"]) == ("zy_coding_v1", "setup-and-train", 600)


def test_a_trackers_token_goes_where_the_recipe_names_it(tmp_path, clock):
    tokens = {"WANDB_API_KEY": "wandb-token", "SWANLAB_API_KEY": "swan-token"}
    sent = {}
    for report_to in ("", "report_to=[wandb]"):
        box = training_box(step("succeeded"))
        job = confirmed(tmp_path, clock, settings=tokens)
        sets = (tuple(report_to.split("=")),) if report_to else ()
        setup_and_train.run(box, replace(job, inputs=replace(job.inputs, recipe_sets=sets)))
        asked = dict(box.asked)
        assert asked["start_setup"]["secrets"].keys().isdisjoint(tokens)
        sent[report_to] = asked["start_train"]["secrets"]
    assert sent == {"": {}, "report_to=[wandb]": {"WANDB_API_KEY": "wandb-token"}}


def test_watching_zero_minutes_leaves_at_once_and_well(tmp_path, clock):
    box = training_box()
    report = setup_and_train.run(box, confirmed(tmp_path, clock, watch_minutes="0"))
    assert (report.state, report.error) == ("starting", None)
    assert box.operations[-1] == "start_train"


def test_deadline_ends_the_watching_and_never_the_run(tmp_path, clock):
    box = training_box(step("running", PROGRESS))
    report = setup_and_train.run(box, confirmed(tmp_path, clock, watch_minutes="2"))
    assert (report.error.code, report.error.exit_code) == ("deadline_passed", 5)
    assert clock.now == pytest.approx(120)
    assert "kill" not in box.operations


def test_failed_run_says_its_remedy(tmp_path, clock):
    outcome = {"exit_code": 1, "reason": "exit code 1", "remedy": "cuda_oom"}
    report = setup_and_train.run(training_box(step("failed", outcome=outcome)), confirmed(tmp_path, clock))
    assert (report.error.code, report.error.exit_code, report.remedy) == ("run_failed", 6, "cuda_oom")
    assert "ZY_MAX_SEQ_LEN" in report.error.values["reason"]


def test_setup_that_fails_starts_no_training(tmp_path, clock):
    gate = ProjectError("zero_samples", path="p").to_json()
    box = box_for_setup(step("failed", error=gate))
    report = setup_and_train.run(box, confirmed(tmp_path, clock))
    assert report.error.exit_code == 7
    assert "start_train" not in box.operations


def test_corpus_with_a_stop_verdict_starts_no_training_even_if_the_setup_ended_well(tmp_path, clock):
    box = box_for_setup(manifest=small_manifest(verdict="stop"))
    with pytest.raises(ProjectError, match="gate_failed"):
        setup_and_train.run(box, confirmed(tmp_path, clock))


def test_lost_connection_is_tried_again_for_ten_minutes(tmp_path, clock):
    lost = ProjectError("connection_lost", host="h", reason="reset")
    box = training_box(lost, lost, step("succeeded"))
    report = setup_and_train.run(box, confirmed(tmp_path, clock))
    assert report.state == "succeeded"
    hopeless = training_box(lost)
    with pytest.raises(ProjectError, match="connection_lost"):
        setup_and_train.run(hopeless, confirmed(tmp_path, clock))
    assert 600 <= sum(clock.naps) < 700


def test_wrong_host_key_is_never_tried_again(tmp_path, clock):
    changed = ProjectError("host_key_mismatch", host="h", seen="SHA256:a", expected="SHA256:b")
    with pytest.raises(ProjectError, match="host_key_mismatch"):
        setup_and_train.run(training_box(changed), confirmed(tmp_path, clock))
    assert clock.naps == []


def test_status_is_one_question(job):
    box = FakeBox({"status": [STATUS]})
    assert status.run(box, job).status == STATUS
    assert box.operations == ["status"]


KEY = "8a3f.0123456789abcdef"
TAIL = {
    "id": "r-1", "kind": "train", "state": "running", "lines": ["x"], "rest": "y", "from_offset": 0, "next_offset": 2,
    "log_key": KEY, "log_change": None, "size": 3, "hidden_lines": 1,
}  # fmt: skip


def test_tail_log_asks_for_12000_bytes_and_for_what_the_reader_may_see(job):
    box = FakeBox({"tail_log": [TAIL]})
    report = tail_log.run(box, job)
    assert dict(box.asked)["tail_log"] == {
        "data": "/data/guanghu-coding", "root": "/opt/guanghu/coding-training",
        "bytes": 12_000, "which": "auto", "see": "public",
    }  # fmt: skip
    assert (report.log_id, report.hidden_lines, report.text, report.next_offset) == ("r-1", 1, "x\ny\n", 2)
    assert report.cursor == f"2@r-1:{KEY}"
    assert f"--from-offset {report.cursor}`" in as_markdown(report, lang="zh", see=SEE_PUBLIC)


def test_a_cursor_that_was_printed_can_be_given_back(tmp_path, clock):
    box = FakeBox({"tail_log": [{**TAIL, "log_change": "rotated"}]})
    report = tail_log.run(box, make_job(tmp_path, clock, "tail-log", from_offset=f"2@r-1:{KEY}"))
    asked = dict(box.asked)["tail_log"]
    assert (asked["from_offset"], asked["log_key"], asked["id"]) == (2, KEY, "r-1")
    assert report.log_change == "rotated"
    assert "(rotation)" in as_markdown(report, lang="en", see=SEE_PUBLIC)
    tail_log.run(box, make_job(tmp_path, clock, "tail-log", from_offset="4711"))
    assert [box.asked[-1][1][key] for key in ("from_offset", "log_key", "id")] == [4711, None, None]


@pytest.mark.parametrize("text", ["-1", "x", "1@", "1@r:", f"1@../r:{KEY}", f"1@r:{KEY}0", "1@r:$(x).y", "٣", "1" * 19])
def test_what_is_no_cursor_is_refused(tmp_path, clock, text):
    with pytest.raises(ProjectError, match="input_invalid"):
        make_job(tmp_path, clock, "tail-log", from_offset=text)


def test_following_prints_on_to_the_end_of_the_run(tmp_path, clock):
    shown = []
    steps = [
        step("running", "one", offset=5, log_key="a.0"), step("running", offset=5, log_key="a.0"),
        step("running", "two", offset=3, log_key="b.0", log_change="rotated", hidden_lines=2),
        step("succeeded", "three", offset=9, log_key="b.1"), step("succeeded", offset=9, log_key="b.1"),
    ]  # fmt: skip
    box = FakeBox({"tail_log": [TAIL], "follow": steps})
    report = tail_log.run(box, make_job(tmp_path, clock, "tail-log", shown, follow="true"))
    assert [line for line in shown if "(rotation)" not in line] == ["x", "one", "two", "three"]
    assert "(rotation)" in shown[2]
    cursors = [(args["offset"], args["log_key"]) for op, args in box.asked if op == "follow"]
    assert cursors == [(2, KEY), (5, "a.0"), (5, "a.0"), (3, "b.0"), (9, "b.1")]
    assert (report.state, report.error, report.hidden_lines, report.text) == ("succeeded", None, 3, "")
    assert report.cursor == "9@r-1:b.1"


@pytest.mark.parametrize(
    ("answer", "minutes", "code"),
    [
        (step("running", "one"), "2", "deadline_passed"),
        (step("failed", outcome={"reason": "exit code 1", "remedy": None}), "2", "run_failed"),
        (step("lost"), "2", "session_vanished"),
        (step("running"), "0", None),
    ],
)
def test_following_ends_with_what_became_of_the_run(tmp_path, clock, answer, minutes, code):
    box = FakeBox({"tail_log": [TAIL], "follow": [{**answer, "next_offset": 2}]})
    report = tail_log.run(box, make_job(tmp_path, clock, "tail-log", follow="true", watch_minutes=minutes))
    assert (report.error and report.error.code) == code
    assert clock.now == (120 if code == "deadline_passed" else 0)
    assert ("follow" in box.operations) == (minutes != "0")


def test_the_wish_for_the_end_goes_in_the_request_and_nowhere_else(tmp_path, clock):
    wish = "curl -H 'Authorization: t0ken' https://h/off"
    for given in (wish, None):
        box = training_box(step("succeeded"))
        settings = {"ZY_ON_END": wish} if given else None
        setup_and_train.run(
            box, replace(confirmed(tmp_path, clock), settings=Settings.from_environment(settings or {}))
        )
        asked = dict(box.asked)
        assert asked["start_train"]["on_end"] == given
        assert "t0ken" not in repr({**asked, "start_train": {**asked["start_train"], "on_end": None}})
        dry = replace(make_job(tmp_path, clock, settings=settings), is_dry_run=True)
        keys = [item.key for item in setup_and_train.run(FakeBox({"facts": [FACTS]}), dry).steps]
        assert ("end_command" in keys) == (given is not None)
    off = replace(make_job(tmp_path, clock, settings={"ZY_ON_END": "poweroff"}), is_dry_run=True)
    steps = setup_and_train.run(FakeBox({"facts": [FACTS]}), off)
    assert steps.steps[-1].key == "power_off"
    for lang in ("zh", "en"):
        assert "ZY_ON_END" in as_markdown(steps, lang=lang, see=SEE_PUBLIC)


def at_work(run="running", setup=None):
    run = run and {"id": "r-1", "state": run}
    return {**STATUS, "run": run, "setup": setup and {"id": "s-1", "state": setup}}


KILLED = {"ended": [{"kind": "train", "id": "r-1", "state": "running"}], "alive": 0, "audited": True}
GONE = {"alive": 0, "gpus": [], "has_gpus": True}


def test_kill_waits_for_the_checkpoint_and_looks_for_what_is_left(job, clock):
    states = [at_work(), at_work(), at_work(), at_work("interrupted")]
    box = FakeBox({"status": states, "kill": [KILLED], "gone": [GONE]})
    report = kill.run(box, job)
    assert [args["mode"] for op, args in box.asked if op == "kill"] == ["checkpoint"]
    assert dict(box.asked)["gone"]["ids"] == ["r-1"]
    assert (report.ended[0]["state"], report.was_forced, report.error) == ("interrupted", False, None)
    assert (report.gpus, report.was_audited) == ((), True)


def test_kill_uses_force_after_the_grace(job, clock):
    kills = [KILLED, {**KILLED, "alive": 2, "audited": False}]
    box = FakeBox({"status": [at_work()], "kill": kills, "gone": [{**GONE, "alive": 2}]})
    report = kill.run(box, replace(job, grace_s=60))
    assert [args["mode"] for op, args in box.asked if op == "kill"] == ["checkpoint", "now"]
    assert clock.now == pytest.approx(90, abs=2)
    assert (report.error.code, report.error.values["count"], report.was_forced) == ("kill_incomplete", 2, True)
    assert not report.was_audited


@pytest.mark.parametrize(
    ("left", "code", "values"),
    [
        ({"gpus": None}, None, None),
        ({"gpus": [{"index": 1, "used_mib": 20_000, "pids": []}]}, "gpu_memory_orphaned", ("1", 20_000, None)),
        (
            {"alive": 1, "gpus": [{"index": 0, "used_mib": 9_000, "pids": [4711]}]},
            "gpu_memory_held",
            ("0", 9_000, "4711"),
        ),
    ],
)
def test_kill_says_who_still_holds_gpu_memory(job, clock, left, code, values):
    box = FakeBox({"status": [at_work("killed")], "kill": [KILLED], "gone": [{**GONE, **left}]})
    report = kill.run(box, job)
    assert (report.error and report.error.code) == code
    if code is not None:
        assert report.error.exit_code == 6
        assert tuple(report.error.values.get(key) for key in ("gpus", "mib", "pids")) == values
        assert not set(error_lines(report.error, "zh")) & set(error_lines(report.error, "en")) - {"r-1"}
    text = as_markdown(report, lang="en", see=SEE_PUBLIC)
    assert ("could not be asked" in text) == (code is None)
    assert "free again" not in text


def test_kill_with_nothing_at_work_says_so(job):
    box = FakeBox({"status": [STATUS], "kill": [{"ended": [], "alive": 0, "audited": True}]})
    assert kill.run(box, job).ended == ()


def test_kill_in_a_dry_run_ends_nothing(job):
    box = FakeBox({"status": [at_work(setup="running")]})
    report = kill.run(box, replace(job, is_dry_run=True))
    assert [item.values["name"] for item in report.steps] == ["r-1", "s-1"]


def test_setup_that_outlasts_the_deadline_is_red_where_a_training_was_asked_for(tmp_path, clock):
    box = box_for_setup(step("running"))
    report = setup_and_train.run(box, confirmed(tmp_path, clock))
    assert (report.error.code, report.error.exit_code) == ("training_not_started", 6)
    assert "start_train" not in box.operations


def test_training_is_bound_to_the_samples_of_the_summary(tmp_path, clock):
    box = training_box(step("succeeded"))
    report = setup_and_train.run(box, confirmed(tmp_path, clock))
    assert dict(box.asked)["start_train"]["samples_sha256"] == report.setup.manifest.samples_sha256


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_link_that_breaks_after_the_end_hides_no_result(tmp_path, clock, state):
    box = training_box(step(state, outcome={"exit_code": 1, "reason": "exit code 1", "remedy": None}))
    box.answers["status"] = [ProjectError("connection_lost", host="h", reason="r")]
    report = setup_and_train.run(box, confirmed(tmp_path, clock))
    assert report.state == state
    assert report.checkpoints == ()
    assert (report.error is None) == (state == "succeeded")


def test_link_that_breaks_before_the_counts_starts_no_training(tmp_path, clock):
    box = training_box(step("succeeded"))
    box.answers["manifest"] = [ProjectError("connection_lost", host="h", reason="r")]
    with pytest.raises(ProjectError, match="connection_lost"):
        setup_and_train.run(box, confirmed(tmp_path, clock))
    assert "start_train" not in box.operations


def test_link_that_breaks_for_a_moment_before_the_counts_costs_nothing(tmp_path, clock):
    box = training_box(step("succeeded"))
    box.answers["manifest"] = [ProjectError("connection_lost", host="h", reason="r"), *box.answers["manifest"]]
    report = setup_and_train.run(box, confirmed(tmp_path, clock))
    assert report.setup.manifest.total_samples == 5
    assert box.operations.count("manifest") == 2
    assert "start_train" in box.operations
