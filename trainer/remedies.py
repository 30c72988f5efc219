"""Known failures: a pattern in a log, its cause, what helps, and where that is known from. Pure.

Runs on the box too: standard library and Python 3.8 only. A row's words are `remedy.<code>` in the catalogues,
"cause: what helps"; docs/remedies.md is made from both.
"""

import re
from dataclasses import dataclass
from typing import Optional, Pattern, Tuple

#: Characters above a failure in which the frames of its traceback stand; ranks' lines may stand between them.
FRAMES_WINDOW = 16 * 1024


@dataclass(frozen=True)
class Remedy:
    """One known failure.

    `source` names the document behind the row. `frames`, where a row has it, must be found in the traceback above
    the match too: the same failure in another phase has another remedy.
    """

    code: str
    pattern: Pattern[str]
    source: str
    frames: Optional[Pattern[str]] = None

    def is_shown_by(self, log_text: str) -> bool:
        """Whether the log shows this failure; judged by the first match, what follows it is its consequence."""
        match = self.pattern.search(log_text)
        if match is None or self.frames is None:
            return match is not None
        return self.frames.search(log_text, max(0, match.start() - FRAMES_WINDOW), match.start()) is not None


def _row(code: str, pattern: str, source: str, *, within: str = "") -> Remedy:
    """Return a row; `within` names the functions of which one is in the traceback, `a|b`."""
    frames = re.compile(r", in (?:%s)\b" % within) if within else None
    return Remedy(code, re.compile(pattern), source, frames)


def _ours(code: str) -> str:
    """Return the pattern of one of our own error lines (`corpus_builder.errors.format_error_line`)."""
    return r'ZY_ERROR \{"code": "%s"' % code


_CUDA_OOM = (
    r"CUDA out of memory\. Tried|torch\.(?:cuda\.)?OutOfMemoryError|CUDA error: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (?:2 )?'out of memory'"
)

#: First match wins. A cause stands before what it brings about, a narrow row before a wide one: a rank that dies
#: leaves the others waiting for it, so the rows of ranks that lost each other are the last.
#: No repeat is unbounded or stands in another one: the time of a search grows with the log, and no log makes it
#: grow faster (tests/trainer/test_remedies.py reads the patterns).
REMEDIES: Tuple[Remedy, ...] = (
    # the hardware and its driver
    _row(
        "ecc_error",
        r"uncorrectable ECC error encountered|CUDA_ERROR_ECC_UNCORRECTABLE"
        r"|NVRM: Xid \([^)\n]{1,60}\): (?:48|64|94|95)\b",
        "CUDA runtime error 214; NVIDIA Xid 48, 64, 94, 95",
    ),
    _row(
        "driver_mismatch",
        r"Driver/library version mismatch|unsupported display driver / cuda driver combination",
        "NVML; CUDA runtime error 803",
    ),
    _row(
        "driver_too_old",
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient for CUDA runtime"
        r"|PTX was compiled with an unsupported toolchain|libcuda\.so\.1: cannot open shared object",
        "c10/cuda/CUDAFunctions.cpp; CUDA runtime errors 35, 222",
    ),
    _row(
        "driver_lost",
        # Xid 13, 31, 43 and 45 are faults of a program or follow from its end, 63 is a note
        r"NVRM: Xid \([^)\n]{1,60}\): (?!(?:13|31|43|45|63)\b)\d|GPU is lost|has fallen off the bus|GPU_IS_LOST"
        r"|couldn't communicate with the NVIDIA driver|Found no NVIDIA driver|no CUDA-capable device is detected"
        r"|Failed to initialize NVML: (?:Unknown Error|GPU access)|(?i:nvml[^\n]{0,20}driver not loaded)",
        "NVIDIA Xid catalogue; nvidia-smi; iterative/cml#622",
    ),
    _row(
        "gpu_arch_missing",
        r"no kernel image is available for execution on the device|cudaErrorNoKernelImageForDevice",
        "CUDA runtime error 209; pytorch#172352 (sm_70 ends with torch 2.10)",
    ),
    _row("torch_without_cuda", r"Torch not compiled with CUDA enabled", "torch/cuda/__init__.py"),
    # the corpus
    _row("no_soul_files", r"\[corpus\] gate soul_files_found: stop\b", "the first plan, section 4"),
    _row("no_relation_samples", r"\[corpus\] gate relation: stop\b", "the first plan, section 4"),
    _row("few_samples", r"\[corpus\] gate total: stop\b", "the first plan, section 4"),
    # what the trainer found in its numbers
    _row(
        "no_trained_tokens",
        _ours("zero_samples") + r', "values": \{"path": "samples"|got num_samples=0\b',
        "the first plan, section 4; torch/utils/data/sampler.py",
    ),
    _row("labels_disagree", _ours("labels_disagree"), "the first plan, section 4"),
    _row(
        "loss_scale_minimum",
        r"Current loss scale already at minimum|reason=loss_scale_minimum\b|" + _ours("loss_scale_minimum"),
        "deepspeed/runtime/fp16/loss_scaler.py",
    ),
    _row("too_many_skipped", _ours("too_many_skipped") + r"|reason=too_many_skipped\b", "DeepSpeed#931"),
    _row(
        "nan_at_start",
        _ours("(?:loss|gradient)_not_finite")
        + r'[^}\n]{0,200}"step": \d\b|nan_stopped step=\d reason=(?:loss|gradient)_',
        "the first plan, section 4",
    ),
    _row(
        "nan_loss",
        _ours("(?:loss|gradient)_not_finite") + r"|nan_stopped step=\d{1,9} reason=(?:loss|gradient)_",
        "the first plan, section 4; trl#6702",
    ),
    _row(
        "map_hang",
        r"subprocesses has abruptly died during map operation|" + _ours("encoding_not_done"),
        "the first plan, section 4; datasets/utils/py_utils.py",
    ),
    _row(
        "ranks_changed",
        r"checkpoint being loaded used a DP world size of|" + _ours("ranks_changed"),
        "deepspeed/runtime/engine.py",
    ),
    _row("checkpoint_corrupt", _ours("checkpoint_corrupt"), "transformers#35782, #35525"),
    # the GPU's memory, by phase
    _row(
        "gpu_shared",
        r"Process \d{1,10} has (?:\d{2,3}|[2-9])\.\d{1,2} GiB memory in use\. Including non-PyTorch memory"
        r"|this process has \d{1,4}\.\d{1,2} [GM]iB memory in use\. Process \d{1,10} has (?:\d{2,3}|[2-9])\.\d{1,2} GiB"
        r"|" + _ours("gpus_busy"),
        "c10/cuda/CUDACachingAllocator.cpp",
    ),
    _row(
        "pinned_memory",
        r"CUDA error: out of memory|cudaHostAlloc|CUDA error: resource already mapped",
        "transformers#24658",
        within="pin_memory|_pin_tensor|pin_host_memory",
    ),
    _row(
        "cuda_oom_save",
        _CUDA_OOM,
        "deepspeed/runtime/engine.py",
        within="_zero3_consolidated_16bit_state_dict|save_16bit_model|save_checkpoint|_save_checkpoint|save_model"
        "|get_state_dict",
    ),
    _row(
        "cuda_oom_load",
        _CUDA_OOM,
        "deepspeed/runtime/zero/stage3.py; DeepSpeed#3132",
        within="from_pretrained|_load_pretrained_model|initialize_optimizer_states|_setup_for_real_optimizer"
        "|_configure_zero_optimizer",
    ),
    _row(
        "cuda_oom_step",
        _CUDA_OOM,
        "deepspeed/runtime/zero/stage3.py; LlamaFactory#7532",
        within="_optimizer_step|_prepare_sub_group|_prepare_fp32_grad_for_sub_group|_take_model_step|step_subgroup",
    ),
    _row("cuda_oom", _CUDA_OOM, "the first plan, section 4"),
    # the machine's memory, disk and limits
    _row(
        "shm_small",
        r"insufficient shared memory \(shm\)|out of shared memory\. Please|killed by signal: Bus error"
        r"|Error while creating shared memory segment|No space left on device: '/dev/shm/"
        r"|unable to (?:write to file|allocate shared memory\(shm\) for file) </torch_"
        r"|exits with return code = -7\b|ended with (?:signal 7|exit code 249)\b",
        "torch/utils/data; pytorch#5040; nccl/src/misc/shmutils.cc",
    ),
    _row(
        "disk_full",
        r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]|"
        + _ours("(?:disk_short|box_disk_full)"),
        "errno(3)",
    ),
    _row("too_many_files", r"Too many open files|\[Errno 24\]", "torch/utils/data/dataloader.py; errno(3)"),
    _row(
        "host_oom",
        r"exits with return code = -9\b|exitcode {1,4}: -9\b|ended with (?:signal 9|exit code (?:137|247))\b"
        r"|oom-kill:constraint|invoked oom-killer|[Oo]ut of memory: Killed process"
        r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|\[Errno 12\] Cannot allocate|std::bad_alloc"
        r"|(?m:^)(?:\[rank\d{1,4}\]: )?(?:[\w.]{1,60}\._Array)?MemoryError(?m:$|:)",
        "DeepSpeed#4239; the kernel's log; c10/core/impl/alloc_cpu.cpp",
    ),
    # the environment
    _row("glibc_old", r"version `(?:GLIBC|GLIBCXX|CXXABI)_[\d.]{1,12}' not found", "ld.so(8); DeepSpeed#2886, #4257"),
    _row("no_python_headers", r"Python\.h: No such file or directory", "DeepSpeed#1846"),
    _row(
        "cuda_mismatch",
        r"CUDAMismatchException|The detected CUDA version \([^)\n]{1,20}\) mismatches",
        "deepspeed/ops/op_builder/builder.py; torch/utils/cpp_extension.py",
    ),
    _row(
        "cuda_home_missing",
        r"MissingCUDAException|OSError: CUDA_HOME environment variable is not set"
        r"|fatal error: (?:cuda|cublas|cusparse|cusolver|curand|nv)\w{0,30}\.h: No such file",
        "deepspeed/ops/op_builder/builder.py; DeepSpeed#889",
    ),
    _row(
        "no_compiler",
        r"Ninja is required to load C\+\+ extensions|No such file or directory: '(?:ninja|c\+\+|g\+\+|gcc|cc)'"
        r"|\['which', '[cg]\+\+'\]' returned non-zero|(?:[cg]\+\+|gcc|ninja): (?:command )?not found"
        r"|error trying to exec 'cc1plus'|Failed to find C compiler",
        "torch/utils/cpp_extension.py; triton/runtime/build.py",
    ),
    _row(
        "kernel_not_built",
        r"Error building extension '|object has no attribute 'ds_opt_adam'",
        "torch/utils/cpp_extension.py; DeepSpeed#1846",
    ),
    _row(
        "illegal_instruction",
        r"exits with return code = -4\b|ended with (?:signal 4|exit code 252)\b|Illegal instruction",
        "signal(7); op_builder/builder.py compiles with -march=native",
    ),
    _row(
        "package_missing",
        r"No module named '(?:torch|transformers|deepspeed|accelerate|peft|safetensors|tokenizers)'",
        "Python",
    ),
    _row(
        "packages_changed",
        r"THESE PACKAGES DO NOT MATCH THE HASHES|Hash mismatch for `",
        "pip and uv, hash-checking mode",
    ),
    _row(
        "packages_unreachable",
        r"No matching distribution found for|OSError: HTTPSConnectionPool|[Ff]ailed to fetch: `http"
        r"|WARNING: Retrying \(Retry\(total=0\b",  # with constraints pip ends in "conflicting dependencies" instead
        "pip and uv",
    ),
    _row(
        "bf16_unsupported",
        r"doesn't support bf16/gpu|Type bf16 is not supported|[Bb][Ff]loat16 is (?:not|only) supported|bf16 requires",
        "the first plan, section 1; deepspeed/runtime/engine.py; transformers/training_args.py",
    ),
    _row(
        "no_flash_attention",
        r"FlashAttention only supports Ampere GPUs|FlashAttention\d has been toggled on, but it cannot be used",
        "flash_attn; transformers/modeling_utils.py",
    ),
    _row(
        "no_bitsandbytes",
        r"Using `bitsandbytes` [48]-bit quantization requires|CUDA Setup failed despite GPU being available"
        r"|are supported by the bitsandbytes version you have",
        "transformers/quantizers; transformers/integrations/bitsandbytes.py",
    ),
    # the base model
    _row("model_gated", r"Cannot access gated repo|access a gated repo\.", "huggingface_hub/utils/_http.py"),
    _row(
        "model_not_found",
        r"Repository Not Found for url|and is not a valid model identifier",
        "huggingface_hub/utils/_http.py; transformers/utils/hub.py",
    ),
    _row(
        "hub_unreachable",
        r"We couldn't connect to '|locate the file on the Hub and we cannot find|outgoing traffic has been disabled",
        "transformers/utils/hub.py; huggingface_hub/file_download.py",
    ),
    _row(
        "shard_missing",
        r"does not appear to have a file named|Error no file named \S{1,80}"
        r"|No such file or directory: [^\n]{0,300}\.(?:safetensors|bin)\b",
        "transformers/modeling_utils.py; safetensors",
    ),
    _row(
        "weights_broken",
        r"Error while deserializing header|PytorchStreamReader failed|invalid load key, '",
        "safetensors/src/tensor.rs; torch/serialization.py",
    ),
    _row(
        "model_too_new",
        r"Transformers does not recognize this architecture|match any variant of untagged enum"
        r"|Tokenizer class \w{1,80} does not exist or is not currently|Tokenizer class \w{1,80} is not currently",
        "transformers/models/auto; tokenizers",
    ),
    _row("no_chat_template", r"tokenizer\.chat_template is not set", "transformers/tokenization_utils_base.py"),
    # storage
    _row(
        "storage_expired",
        r"Request has expired|[>('\"](?:ExpiredToken|ExpiredRequest)[<)'\"]|" + _ours("storage_expired"),
        "S3 and COS error codes",
    ),
    _row("storage_clock", r"[>('\"]RequestTimeTooSkewed[<)'\"]", "S3 and COS error codes"),
    _row("storage_key_wrong", r"[>('\"](?:SignatureDoesNotMatch|InvalidAccessKeyId)[<)'\"]", "S3 and COS error codes"),
    _row("storage_missing", r"[>('\"](?:NoSuchKey|NoSuchBucket)[<)'\"]", "S3 and COS error codes"),
    _row("storage_denied", r"[>('\"]AccessDenied[<)'\"]|" + _ours("storage_denied"), "S3 and COS error codes"),
    # SSH, where the machine itself connects to another one
    _row(
        "ssh_host_key",
        r"Host key verification failed\.|REMOTE HOST IDENTIFICATION HAS CHANGED|"
        + _ours("host_key_(?:mismatch|unknown)"),
        "ssh(1)",
    ),
    _row(
        "ssh_denied",
        r"Permission denied \((?:publickey|password|keyboard-interactive|gssapi)|\bAuthenticationException: |"
        + _ours("login_refused"),
        "ssh(1); paramiko/ssh_exception.py",
    ),
    _row(
        "ssh_unreachable",
        r"ssh: connect to host \S{1,255} port \d{1,5}: |ssh: Could not resolve hostname"
        r"|kex_exchange_identification: |NoValidConnectionsError",
        "ssh(1); paramiko/ssh_exception.py",
    ),
    # the ranks and the ways between them; what another row explains brings these about
    _row(
        "port_in_use",
        r"EADDRINUSE|\[Errno 98\]|failed to listen on any local network address",
        "torch/csrc/distributed/c10d/socket.cpp",
    ),
    _row(
        "nccl_no_interface",
        r"no (?:socket|NCCL_SOCKET_IFNAME) interface found|ncclSocketInit: connecting to address  ?with family",
        "nccl/src/bootstrap.cc; nccl#1837",
    ),
    _row(
        "segfault",
        r"exits with return code = -11\b|ended with (?:signal 11|exit code 245)\b|exitcode {1,4}: -11\b",
        "signal(7)",
    ),
    _row(
        "nccl_timeout",
        r"Watchdog caught collective operation timeout|NCCL operations have failed or timed out"
        r"|nccl(?:System|Remote|UnhandledCuda)Error: |NCCL communicator was aborted"
        r"|gloo/transport/tcp/\w{1,20}\.cc:\d{1,5}\] |Timed out waiting \d{1,9}ms for "
        r"|Timed out after \d{1,6} seconds waiting for clients|client socket has timed out after",
        "torch/csrc/distributed/c10d; LlamaFactory#7396",
    ),
)


def find_remedy(log_text: str) -> Optional[Remedy]:
    """Return the first row of the table that `log_text` shows, or None."""
    return next((remedy for remedy in REMEDIES if remedy.is_shown_by(log_text)), None)
