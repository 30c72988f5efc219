"""Settings: read once, checked once; hostile values are refused by name and never repeated."""

import pytest

from controller.settings import POWEROFF, SETTINGS, Settings
from corpus_builder.errors import ProjectError
from corpus_builder.say import LANGUAGES, format_error
from trainer import on_end

REACHABLE = {"ZY_GPU_HOST": "gpu-1.example", "ZY_GPU_USER": "trainer", "ZY_GPU_KEY": "the key"}


def refusal(**environment: str) -> ProjectError:
    with pytest.raises(ProjectError) as caught:
        Settings.from_environment(environment)
    assert (caught.value.code, caught.value.exit_code) == ("setting_invalid", 2)
    for lang in LANGUAGES:
        assert format_error(caught.value, lang).count("\n") == 2
    return caught.value


def test_nothing_set_is_the_table_of_defaults():
    settings = Settings.from_environment({"PATH": "/bin", "ZY_LR": "1e-5"})
    assert (settings.gpu_port, settings.lang, settings.fetch_allow, settings.gpu_host) == (22, "zh", (), None)
    assert (settings.data, settings.root) == ("/data/guanghu-coding", "/opt/guanghu/coding-training")


def test_values_are_stripped_and_empty_means_unset():
    given = {"ZY_GPU_HOST": " gpu-1.example\n", "ZY_GPU_PORT": " 2222 ", "ZY_LANG": "", "ZY_MOTHER_VENV": "  "}
    settings = Settings.from_environment(given)
    assert (settings.gpu_host, settings.gpu_port) == ("gpu-1.example", 2222)
    assert (settings.lang, settings.mother_venv) == ("zh", None)


@pytest.mark.parametrize(
    ("text", "allowed"), [("1", True), ("TRUE", True), ("yes", True), ("0", False), ("no", False), ("", False)]
)
def test_nothing_is_installed_unless_somebody_says_so(text, allowed):
    assert Settings.from_environment({"ZY_ALLOW_INSTALL": text}).allow_install is allowed


HOSTILE = ["-oProxyCommand=id", 'a"; touch x #', "$(id)", "`id`", "a b", "a\nb", "a\x00b", "a'b", "--", "a;b", "a|b"]


@pytest.mark.parametrize("name", ["ZY_GPU_HOST", "ZY_GPU_USER", "ZY_GPU_PORT", "ZY_GPU_JUMP", "ZY_COS_REGION"])
@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_is_refused_by_name(name, value):
    error = refusal(**{name: value})
    assert error.values["name"] == name
    assert value not in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ZY_GPU_HOST", "root@gpu-1"),
        ("ZY_GPU_HOST", "gpu-1:22"),
        ("ZY_GPU_HOST", "ssh://gpu-1"),
        ("ZY_GPU_PORT", "0"),
        ("ZY_GPU_PORT", "65536"),
        ("ZY_GPU_PORT", "２２"),
        ("ZY_GPU_PORT", "22.0"),
        ("ZY_GPU_JUMP", "a@b@c"),
        ("ZY_GPU_JUMP", "jump:99999"),
        ("ZY_LANG", "fr"),
        ("ZY_ALLOW_INSTALL", "maybe"),
        ("ZY_ALLOW_INSTALL", "2"),
        ("ZY_CODING_TRAIN_DATA", "data"),
        ("ZY_CODING_TRAIN_DATA", "/"),
        ("ZY_CODING_TRAIN_DATA", "/data/../etc"),
        ("ZY_CODING_TRAIN_ROOT", "//opt"),
        ("ZY_CODING_TRAIN_ROOT", "/opt/./x"),
        ("ZY_CODING_TRAIN_ROOT", "/opt\n/x"),
        ("ZY_MOTHER_VENV", "~/venv"),
        ("AWS_ENDPOINT_URL", "s3.example"),
        ("AWS_ENDPOINT_URL", "https://user:pw@s3.example"),
        ("ZY_FETCH_ALLOW", "ok.example, -bad"),
        ("ZY_ON_END", "sh -c 'unfinished"),
        ("ZY_ON_END", "''\nrm"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name, value):
    error = refusal(**{name: value})
    assert error.values["name"] == name
    assert "Value error" not in str(error)


@pytest.mark.parametrize("wish", ["poweroff", "sh -c 'curl -s https://h/off; echo $(id)'", '"a b" c'])
def test_a_wish_for_the_end_is_poweroff_or_any_command(wish):
    assert Settings.from_environment({"ZY_ON_END": f" {wish} "}).on_end == wish
    assert POWEROFF == on_end.POWEROFF


@pytest.mark.parametrize("host", ["gpu-1", "10.0.0.7", "2001:db8::7", "fe80::1%eth0", "GPU_1.a.cn", "机器.example"])
def test_hosts_of_every_kind_are_taken(host):
    assert Settings.from_environment({"ZY_GPU_HOST": host}).gpu_host == host


def test_all_wrong_settings_are_named_at_once():
    error = refusal(ZY_GPU_PORT="x", ZY_LANG="fr", ZY_GPU_HOST="ok")
    assert error.values["name"] == "ZY_GPU_PORT, ZY_LANG"


def test_a_trailing_slash_is_taken_off_and_hosts_are_listed():
    given = {"ZY_CODING_TRAIN_DATA": "/data/zy/", "ZY_FETCH_ALLOW": "A.example b.example,"}
    settings = Settings.from_environment(given)
    assert (settings.data, settings.fetch_allow) == ("/data/zy", ("a.example", "b.example"))


def test_whatever_is_needed_and_empty_is_named_at_once():
    with pytest.raises(ProjectError, match="setting_missing name=ZY_GPU_HOST, ZY_GPU_KEY") as caught:
        Settings.from_environment({"ZY_GPU_USER": "trainer"}).ssh()
    assert caught.value.exit_code == 2


def test_the_route_leads_over_the_jump_host():
    ssh = Settings.from_environment({**REACHABLE, "ZY_GPU_JUMP": "door.example:2200"}).ssh()
    assert ssh.route() == [("trainer", "door.example", 2200), ("trainer", "gpu-1.example", 22)]
    assert ssh.name == "trainer@gpu-1.example:22"


def test_a_password_will_do_for_a_key():
    ssh = Settings.from_environment({**REACHABLE, "ZY_GPU_KEY": "", "ZY_GPU_PASSWORD": "long password"}).ssh()
    assert (ssh.key, ssh.password) == (None, "long password")


def test_secrets_are_masked_line_by_line_but_nothing_short_or_numeric():
    secrets = {
        "ZY_GPU_KEY": "-----BEGIN X-----\r\nb3BlbnNzaC1rZXk\nshort\n-----END X-----",
        "ZY_GPU_PASSWORD": "22",
        "ZY_COS_SECRET_ID": "12345678901",
        "ZY_COS_SECRET_KEY": "a-cos-secret",
        "ZY_GPU_USER": "a-user-not-secret",
        "ZY_GPU_KEY_PASSPHRASE": "line-number-one\\nline-number-two",
    }
    masks = Settings.from_environment(secrets).masks()
    assert set(masks) == {"b3BlbnNzaC1rZXk", "a-cos-secret", "line-number-one", "line-number-two"}


def test_no_secret_is_in_a_representation():
    secrets = {setting.name: "canary-7f3a" for setting in SETTINGS if setting.is_secret}
    assert len(secrets) >= 8
    settings = Settings.from_environment({**secrets, "ZY_GPU_HOST": "h", "ZY_GPU_USER": "u"})
    assert "canary" not in repr(settings) + str(settings) + repr(settings.ssh()) + settings.model_dump_json()


def test_every_row_of_the_table_says_what_it_means():
    names = [setting.name for setting in SETTINGS]
    assert len(names) == len(set(names)) >= 20
    assert all(setting.meaning and setting.name.isupper() for setting in SETTINGS)


@pytest.mark.parametrize(
    ("report_to", "names"),
    [
        ((), []),
        (("tensorboard",), []),
        (("wandb",), ["WANDB_API_KEY"]),
        (("swanlab", "wandb"), ["SWANLAB_API_KEY", "WANDB_API_KEY"]),
    ],
)
def test_tokens_of_trackers_that_are_named_and_no_others(report_to, names):
    settings = Settings.from_environment({"SWANLAB_API_KEY": "swan-token", "WANDB_API_KEY": "wandb-token"})
    assert sorted(settings.tracker_tokens(report_to)) == names
    assert Settings.from_environment({}).tracker_tokens(report_to) == {}
