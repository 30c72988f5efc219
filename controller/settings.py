"""What the runner is told: secrets and variables (design 4.6), read once, checked once. Pure.

The fields below are the one table: names, meanings and checks; documentation is generated from `SETTINGS`. A person
types these values into a web form, so they are stripped, empty means unset, and no complaint repeats a value.

    >>> Settings.from_environment({"ZY_GPU_HOST": " gpu-1.example ", "ZY_GPU_PORT": ""}).gpu_host
    'gpu-1.example'
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError

from controller.addresses import checked_host, checked_port, checked_user, parse_jump
from corpus_builder.config import BOOLEANS
from corpus_builder.errors import ProjectError

MIN_MASKED_CHARS = 8  # a masked `22` would turn `step=122` into `step=1***` (runner#2109)
POWEROFF = "poweroff"  # of ZY_ON_END; anything else is a command
_MAX_NAME_BYTES = 255  # of Linux's file systems; the longest path of ours below a folder leaves the rest of 4096
_MAX_PATH_BYTES = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _checked_jump(text: str) -> str:
    parse_jump(text)
    return text


def _checked_path(text: str) -> str:
    path = text.rstrip("/")
    if not path.startswith("/") or _CONTROL.search(path) or posixpath.normpath(path) != path or path.startswith("//"):
        raise ValueError("reason.box_path")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES or max(map(len, map(os.fsencode, path.split("/")))) > _MAX_NAME_BYTES:
        raise ValueError("reason.path_length")
    return path


def _checked_region(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", text):
        raise ValueError("reason.region")
    return text


def _checked_web_address(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", text) or _CONTROL.search(text):
        raise ValueError("reason.web_address")
    return text.rstrip("/")


def _checked_on_end(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words or _CONTROL.search(text):
        raise ValueError("reason.on_end")
    return text


def _hosts(text: Any) -> Any:
    return tuple(checked_host(host.lower()) for host in re.split(r"[\s,]+", text) if host)


def _checked_yes(text: Any) -> bool:
    try:
        return BOOLEANS[str(text).lower()]
    except KeyError:
        raise ValueError("reason.yes_or_no") from None


Host = Annotated[str, AfterValidator(checked_host)]
User = Annotated[str, AfterValidator(checked_user)]
Port = Annotated[int, BeforeValidator(checked_port)]
Jump = Annotated[str, AfterValidator(_checked_jump)]
BoxPath = Annotated[str, AfterValidator(_checked_path)]
Region = Annotated[str, AfterValidator(_checked_region)]
WebAddress = Annotated[str, AfterValidator(_checked_web_address)]
OnEnd = Annotated[str, AfterValidator(_checked_on_end)]
Hosts = Annotated[tuple[str, ...], BeforeValidator(_hosts)]
YesOrNo = Annotated[bool, BeforeValidator(_checked_yes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh:
    """How to reach the box. `key` and `known_hosts` are the texts as they were pasted."""

    host: str
    port: int
    user: str
    known_hosts: str
    jump: str | None
    key: str | None = field(repr=False)
    passphrase: str | None = field(repr=False)
    password: str | None = field(repr=False)
    # what a laptop's own ssh knows (ssh_config.py); nothing of it on a runner
    hops: tuple[tuple[str, str, int], ...] = ()
    key_files: tuple[str, ...] = ()
    uses_agent: bool = False
    agent_only: tuple[bytes, ...] | None = None

    @property
    def name(self) -> str:
        """`user@host:port`, as messages say it."""
        return f"{self.user}@{self.host}:{self.port}"

    def route(self) -> list[tuple[str, str, int]]:
        """Return user, host and port of every hop: the jump hosts, if there are any, then the box."""
        box = (self.user, self.host, self.port)
        if self.jump is None:
            return [*self.hops, box]
        user, host, port = parse_jump(self.jump)
        return [(user or self.user, host, port), box]


class Settings(BaseModel):
    """Every secret and variable that the runner reads; field by field the table of docs/settings.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    gpu_host: Host | None = Field(None, alias="ZY_GPU_HOST", description="name or address of the machine")
    gpu_port: Port = Field(22, alias="ZY_GPU_PORT", description="its SSH port")
    gpu_user: User | None = Field(None, alias="ZY_GPU_USER", description="the user to log in as")
    gpu_known_hosts: str | None = Field(
        None,
        alias="ZY_GPU_KNOWN_HOSTS",
        description="its pinned host keys: known_hosts lines, or a SHA256: fingerprint",
    )
    gpu_jump: Jump | None = Field(
        None, alias="ZY_GPU_JUMP", description="a machine to go through, `user@host:port`; pinned in the same setting"
    )
    gpu_key: SecretStr | None = Field(None, alias="ZY_GPU_KEY", description="the private key, as it stands in its file")
    gpu_key_passphrase: SecretStr | None = Field(
        None, alias="ZY_GPU_KEY_PASSPHRASE", description="the passphrase of that key, if it has one"
    )
    gpu_password: SecretStr | None = Field(
        None, alias="ZY_GPU_PASSWORD", description="the password, where a machine offers nothing else"
    )

    dialog_url: SecretStr | None = Field(
        None,
        alias="ZY_BINGSHUO_DIALOG_URL",
        description="a signed link to the dialog ZIP, used when no input names one",
    )
    cos_region: Region | None = Field(None, alias="ZY_COS_REGION", description="region of a cos:// bucket")
    cos_secret_id: SecretStr | None = Field(None, alias="ZY_COS_SECRET_ID", description="key id for cos://")
    cos_secret_key: SecretStr | None = Field(None, alias="ZY_COS_SECRET_KEY", description="key for cos://")
    aws_access_key_id: SecretStr | None = Field(None, alias="AWS_ACCESS_KEY_ID", description="key id for s3://")
    aws_secret_access_key: SecretStr | None = Field(None, alias="AWS_SECRET_ACCESS_KEY", description="key for s3://")
    aws_session_token: SecretStr | None = Field(
        None, alias="AWS_SESSION_TOKEN", description="session token for s3://, if the keys are temporary"
    )
    aws_region: Region | None = Field(None, alias="AWS_REGION", description="region of an s3:// bucket")
    aws_endpoint_url: WebAddress | None = Field(
        None, alias="AWS_ENDPOINT_URL", description="address of an S3 server other than Amazon's"
    )
    fetch_allow: Hosts = Field(
        (),
        alias="ZY_FETCH_ALLOW",
        description="hosts the machine may fetch from although they are private or plain http",
    )

    swanlab_api_key: SecretStr | None = Field(
        None, alias="SWANLAB_API_KEY", description="token of SwanLab; sent only where the recipe's report_to names it"
    )
    wandb_api_key: SecretStr | None = Field(
        None, alias="WANDB_API_KEY", description="token of Weights & Biases; sent only where report_to names it"
    )

    lang: Literal["zh", "en"] = Field("zh", alias="ZY_LANG", description="language of summaries and errors: zh or en")
    data: BoxPath = Field(
        "/data/guanghu-coding", alias="ZY_CODING_TRAIN_DATA", description="data folder on the machine"
    )
    root: BoxPath = Field(
        "/opt/guanghu/coding-training", alias="ZY_CODING_TRAIN_ROOT", description="folder of our code on the machine"
    )
    pip_index_url: WebAddress | None = Field(
        None, alias="PIP_INDEX_URL", description="package index that the machine's pip uses instead of its own"
    )
    hf_endpoint: WebAddress | None = Field(
        None, alias="HF_ENDPOINT", description="model hub that the machine uses instead of the usual one"
    )
    mother_venv: BoxPath | None = Field(
        None, alias="ZY_MOTHER_VENV", description="a Python environment on the machine to use instead of our own"
    )
    allow_install: YesOrNo = Field(
        False, alias="ZY_ALLOW_INSTALL", description="1: install tmux on the machine where it is missing"
    )

    on_end: OnEnd | None = Field(
        None,
        alias="ZY_ON_END",
        description="after a training has ended in whatever way: `poweroff`, or a command (docs/start-watch-stop.md)",
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Return the settings in `environment`; other variables are ignored.

        Raises:
            ProjectError: `setting_invalid`, naming every wrong setting at once, without its value.
        """
        settings, reasons = cls.read(environment)
        if not reasons:
            return settings
        if len(reasons) == 1:
            [(name, reason)] = reasons.items()
            raise ProjectError("setting_invalid", name=name, reason=reason)
        raise ProjectError(
            "setting_invalid", name=", ".join(reasons), reason="; ".join(f"{n}: {r}" for n, r in reasons.items())
        )

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
        """Return the settings that are right, and for each wrong one, by its name, what is wrong with it."""
        given = {setting.name: environment.get(setting.name, "").strip() for setting in SETTINGS}
        texts = {name: text for name, text in given.items() if text}
        try:
            return cls.model_validate(texts), {}
        except ValidationError as error:
            reasons = {str(detail["loc"][0]): _reason(detail) for detail in error.errors(include_input=False)}
        return cls.model_validate({name: text for name, text in texts.items() if name not in reasons}), reasons

    def ssh(self) -> Ssh:
        """Return how to reach the box; raise `setting_missing` naming everything that is needed and empty.

        Missing host keys are no error here: connecting shows the key that would have to be pinned, and refuses.
        """
        if self.gpu_host is None or self.gpu_user is None or not (self.gpu_key or self.gpu_password):
            needed = {"ZY_GPU_HOST": self.gpu_host, "ZY_GPU_USER": self.gpu_user}
            needed["ZY_GPU_KEY"] = _reveal(self.gpu_key or self.gpu_password)
            raise ProjectError("setting_missing", name=", ".join(name for name, value in needed.items() if not value))
        return Ssh(
            host=self.gpu_host,
            port=self.gpu_port,
            user=self.gpu_user,
            known_hosts=self.gpu_known_hosts or "",
            jump=self.gpu_jump,
            key=_reveal(self.gpu_key),
            passphrase=_reveal(self.gpu_key_passphrase),
            password=_reveal(self.gpu_password),
        )

    def mirrors(self) -> dict[str, str]:
        """Return the variables that tell the machine's tools where to fetch from."""
        given = {"PIP_INDEX_URL": self.pip_index_url, "HF_ENDPOINT": self.hf_endpoint}
        return {name: address for name, address in given.items() if address is not None}

    def tracker_tokens(self, report_to: Sequence[str]) -> dict[str, str]:
        """Return the tokens of the trackers that a recipe reports to, by the names under which they read them."""
        tokens = {
            "swanlab": ("SWANLAB_API_KEY", _reveal(self.swanlab_api_key)),
            "wandb": ("WANDB_API_KEY", _reveal(self.wandb_api_key)),
        }
        wanted = (tokens[tracker] for tracker in report_to if tracker in tokens)
        return {name: token for name, token in wanted if token is not None}

    def masks(self) -> tuple[str, ...]:
        """Return what must never be printed: every secret, line by line, but nothing short or purely numeric."""
        secrets = (value for name in type(self).model_fields if isinstance(value := getattr(self, name), SecretStr))
        lines = (line.strip() for secret in secrets for line in re.split(r"\r?\n|\\n", secret.get_secret_value()))
        return tuple(dict.fromkeys(line for line in lines if is_maskable(line)))


def is_maskable(text: str) -> bool:
    """Whether masking `text` in logs hides a secret and not half of every number or every PEM frame."""
    return len(text) >= MIN_MASKED_CHARS and not text.isdecimal() and not text.startswith("-----")


def _reveal(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None


def _reason(detail: Any) -> str:
    if detail["type"] == "literal_error":
        return "reason.language"
    return str(detail["msg"]).removeprefix("Value error, ")


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    is_secret: bool
    meaning: str


SETTINGS: tuple[Setting, ...] = tuple(
    Setting(str(info.alias), SecretStr in (info.annotation, *get_args(info.annotation)), str(info.description))
    for info in Settings.model_fields.values()
)
