"""The table of known failures: a real wording and a harmless twin per row, causes before consequences, bounded cost.

`log_excerpts/<code>.log` holds the excerpt of a row, then its near miss; `healthy.txt` is the log of a setup and a
run that went well (two ranks on CPUs, with the lines that GPUs and fp16 add).
"""

import errno
import importlib
import os
import shutil
import socket
import sys
import traceback
from pathlib import Path

import pytest

from corpus_builder.errors import parse_error_line
from corpus_builder.say import LANGUAGES, say
from tests.tiny_run import tiny_samples, write_base_model
from trainer.progress import EVENTS, Event, parse_line
from trainer.remedies import FRAMES_WINDOW, REMEDIES, find_remedy

EXCERPTS = Path(__file__).parent / "log_excerpts"
BORDER = "==== near miss ====\n"
CODES = [remedy.code for remedy in REMEDIES]
HEALTHY = (EXCERPTS / "healthy.txt").read_text("utf-8")
#: What ranks say when another one is gone, and the wrapper of torch's launcher around everything.
CONSEQUENCES = """\
[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:39840: \
Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application.
[rank3]:[E503 12:24:44.903 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=808, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800020 milliseconds before timing out.
[rank3]: ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
trainer.train FAILED
  exitcode  : 1 (pid: 4101)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def excerpt_of(code):
    return (EXCERPTS / f"{code}.log").read_text("utf-8").split(BORDER)[0]


def near_miss_of(code):
    return (EXCERPTS / f"{code}.log").read_text("utf-8").split(BORDER)[1]


def code_in(log_text):
    found = find_remedy(log_text)
    return found and found.code


def test_each_row_has_its_own_code_and_its_own_excerpt():
    assert len(CODES) == len(set(CODES)) >= 50
    assert {path.stem for path in EXCERPTS.glob("*.log")} == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_an_excerpt_shows_its_row(code):
    assert code_in(excerpt_of(code)) == code


@pytest.mark.parametrize("code", CODES)
def test_a_harmless_line_that_looks_like_it_shows_nothing(code):
    assert near_miss_of(code).strip()
    assert code_in(near_miss_of(code)) is None


@pytest.mark.parametrize("code", CODES)
def test_a_failure_is_found_in_the_log_of_a_whole_run(code):
    assert code_in(HEALTHY + excerpt_of(code)) == code


@pytest.mark.parametrize("code", CODES)
def test_a_cause_beats_what_it_does_to_the_other_ranks(code):
    assert code_in(excerpt_of(code) + CONSEQUENCES) == code
    assert code_in(CONSEQUENCES + excerpt_of(code)) == code  # the other ranks may speak first


def test_a_healthy_log_shows_nothing():
    assert code_in(HEALTHY) is None
    assert code_in("".join(near_miss_of(code) for code in CODES)) is None


@pytest.mark.parametrize(
    ("cause", "also"),
    [
        ("cuda_oom", "host_oom"),
        ("disk_full", "port_in_use"),
        ("driver_lost", "cuda_oom"),
        ("ecc_error", "driver_lost"),
        ("glibc_old", "kernel_not_built"),
        ("gpu_shared", "cuda_oom"),
        ("host_oom", "port_in_use"),
        ("model_not_found", "shard_missing"),
        ("nan_loss", "host_oom"),
        ("no_python_headers", "kernel_not_built"),
        ("no_relation_samples", "few_samples"),
        ("no_soul_files", "few_samples"),
        ("shm_small", "disk_full"),
        ("storage_expired", "storage_denied"),
    ],
)
def test_the_cause_is_named_where_two_failures_stand(cause, also):
    assert code_in(excerpt_of(also) + excerpt_of(cause)) == cause
    assert code_in(excerpt_of(cause) + excerpt_of(also)) == cause


def test_our_own_lines_in_the_excerpts_are_lines_that_the_trainer_can_say():
    lines = [line for code in CODES for line in (excerpt_of(code) + near_miss_of(code)).splitlines()]
    errors = [line for line in lines if line.startswith("ZY_ERROR")]
    events = [item for line in lines for item in parse_line(line) if isinstance(item, Event)]
    assert len(errors) >= 8
    assert all(parse_error_line(line) for line in errors)
    assert {event.name for event in events} <= set(EVENTS)


# ---------------------------------------------------------------- the phase of a CUDA OOM


OOM = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.\n"


def frame(function, rank=0):
    return f'[rank{rank}]:   File "/opt/venv/lib/python3.10/site-packages/x.py", line 12, in {function}\n'


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("from_pretrained", "cuda_oom_load"),
        ("initialize_optimizer_states", "cuda_oom_load"),
        ("_optimizer_step", "cuda_oom_step"),
        ("_zero3_consolidated_16bit_state_dict", "cuda_oom_save"),
        ("backward", "cuda_oom"),
        ("from_pretrained_or_not", "cuda_oom"),
    ],
)
def test_the_traceback_above_it_tells_the_phase_of_an_oom(function, code):
    other_rank = frame("training_step", rank=3) + "ZY_PROGRESS step=5 total=131 loss=2.9\n"
    assert code_in(frame(function) + other_rank + OOM) == code


def test_a_frame_below_an_oom_or_far_above_it_is_not_its_phase():
    assert code_in(OOM + frame("from_pretrained")) == "cuda_oom"
    assert code_in(frame("from_pretrained") + "x" * FRAMES_WINDOW + OOM) == "cuda_oom"


# ---------------------------------------------------------------- how a child ended


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("step train ended with signal 9", "host_oom"),
        ("step train ended with exit code 137", "host_oom"),
        ("step train ended with exit code 247", "host_oom"),  # DeepSpeed's launcher: sys.exit(-9)
        ("step train ended with signal 11", "segfault"),
        ("step train ended with signal 7", "shm_small"),
        ("step train ended with signal 4", "illegal_instruction"),
        ("step train ended with exit code 1", None),
        ("step train ended with signal 90", None),
        ("step train ended with signal 15", None),
        ("ended at once on request", None),
    ],
)
def test_the_end_of_a_child_that_said_nothing_is_a_sign_too(reason, code):
    assert code_in(f"{HEALTHY}\n{reason}") == code


# ---------------------------------------------------------------- words


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("code", CODES)
def test_words_are_a_cause_and_what_helps(code, lang):
    cause, colon, help_ = say(f"remedy.{code}", lang).partition(": " if lang == "en" else "：")
    assert colon
    assert min(len(cause), len(help_)) >= 4


def test_every_row_names_its_source():
    assert [remedy.code for remedy in REMEDIES if not remedy.source.strip()] == []


# ---------------------------------------------------------------- cost


def parser():
    """Return the module that parses patterns; its name is another one since Python 3.11."""
    return importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")


def steps_per_start(nodes, in_repeat=False):
    """Return the most ways in which `nodes` may match from one place; raise ValueError where it has no bound."""
    most = 1
    for operation, argument in nodes:
        name = str(operation)
        if "REPEAT" in name:
            low, high, body = argument
            if high > 400 or (in_repeat and high > 1):
                raise ValueError("unbounded" if high > 400 else "nested")
            most *= (high - low + 1) * steps_per_start(body, in_repeat or high > 1)
        elif name == "SUBPATTERN":
            most *= steps_per_start(argument[-1], in_repeat)
        elif name == "BRANCH":
            most *= sum(steps_per_start(branch, in_repeat) for branch in argument[1])
        elif name in ("ASSERT", "ASSERT_NOT"):
            most *= steps_per_start(argument[1], in_repeat)
        elif name not in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
            raise ValueError(f"no rule for {name}")
    return most


@pytest.mark.parametrize("remedy", REMEDIES, ids=CODES)
def test_a_search_costs_a_bounded_number_of_steps_per_character(remedy):
    for pattern in filter(None, (remedy.pattern, remedy.frames)):
        assert steps_per_start(parser().parse(pattern.pattern)) <= 2_000


@pytest.mark.parametrize(
    "pattern", [r"(?:a{1,9}){1,9}", r"(?:x|(?:a{2,3}b)?){2}", r"(?:(?:a{2})?){3}", r"a*b", r"x\d+", r"(a)\1"]
)
def test_that_reading_of_patterns_refuses_what_can_explode(pattern):
    with pytest.raises(ValueError, match=r"nested|unbounded|no rule"):
        steps_per_start(parser().parse(pattern))


# ---------------------------------------------------------------- what the installed packages really say


@pytest.fixture(scope="module")
def base_model_dir(tmp_path_factory):
    return write_base_model(tmp_path_factory.mktemp("base"), tiny_samples())


@pytest.fixture
def model_dir(base_model_dir, tmp_path):
    """A model folder to damage."""
    return Path(shutil.copytree(base_model_dir, tmp_path / "model"))


def load(folder):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)


def cut_weights(folder, _):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    load(folder)


def point_to_weights(folder, _):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    load(folder)


def lose_weights(folder, _):
    (folder / "model.safetensors").unlink()
    load(folder)


def lose_a_shard(folder, _):
    name = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        f'{{"metadata": {{}}, "weight_map": {{"lm_head.weight": "{name}"}}}}'
    )
    load(folder)


def know_no_such_type(folder, _):
    (folder / "config.json").write_text('{"model_type": "qwen99"}')
    load(folder)


def know_no_such_tokenizer(folder, _):
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace('"BPE"', '"BPE99"', 1), "utf-8")
    Tokenizer.from_file(str(path))


def have_no_template(folder, _):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokenizer.chat_template = None
    tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])


def have_no_copy_of_a_model(_folder, _):
    from transformers import AutoConfig

    AutoConfig.from_pretrained("example/no-such-model", local_files_only=True)


def take_all_memory(_folder, _):
    import torch

    torch.empty(1 << 50, dtype=torch.uint8)


def listen_twice(_folder, _):
    from torch.distributed import TCPStore

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True)


def draw_from_nothing(_folder, _):
    from torch.utils.data import RandomSampler

    RandomSampler([])


def build_without_ninja(_folder, monkeypatch):
    from torch.utils.cpp_extension import verify_ninja_availability

    monkeypatch.setenv("PATH", "/nowhere")
    verify_ninja_availability()


def compile_without_cuda(_folder, monkeypatch):
    import torch.utils.cpp_extension
    from deepspeed.ops.op_builder.builder import installed_cuda_version

    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    installed_cuda_version()


def overflow_to_the_end(_folder, _):
    import torch
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=1, scale_window=10, min_scale=1, delayed_shift=1, consecutive_hysteresis=False, dtype=torch.half
    )
    scaler.update_scale(True)


def open_files_forever(_folder, _):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def write_to_a_full_disk(_folder, _):
    with open("/dev/full", "w") as full:
        full.write("x")


@pytest.mark.parametrize(
    ("fail", "code"),
    [
        (cut_weights, "weights_broken"),
        (point_to_weights, "weights_broken"),
        (lose_weights, "shard_missing"),
        (lose_a_shard, "shard_missing"),
        (know_no_such_type, "model_too_new"),
        (know_no_such_tokenizer, "model_too_new"),
        (have_no_template, "no_chat_template"),
        (have_no_copy_of_a_model, "hub_unreachable"),
        (take_all_memory, "host_oom"),
        (listen_twice, "port_in_use"),
        (draw_from_nothing, "no_trained_tokens"),
        (build_without_ninja, "no_compiler"),
        (compile_without_cuda, "cuda_home_missing"),
        (overflow_to_the_end, "loss_scale_minimum"),
        (open_files_forever, "too_many_files"),
        (write_to_a_full_disk, "disk_full"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_installed_packages_say_it_so(fail, code, model_dir, monkeypatch):
    with pytest.raises(Exception) as caught:  # noqa: PT011 (the packages raise what they like)
        fail(model_dir, monkeypatch)
    assert code_in(HEALTHY + "".join(traceback.format_exception(caught.value)) + CONSEQUENCES) == code
