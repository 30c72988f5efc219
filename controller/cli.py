"""The command line: parse, call, print. The only importer of click; everything else is imported inside commands.

zy status
zy setup-and-train --recipe coding_v1 --confirm --watch-minutes 30
zy corpus build --plan zhuyuan --base-model-dir ~/models/mother
zy train coding_v1 --samples corpus-out/coding-sft.jsonl --dry-run
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from controller.dial import Dialed
    from controller.invocation import Surroundings

Command = TypeVar("Command", bound=Callable[..., Any])

QUICK = ("status", "tail-log", "kill")  # done in about a second, most of it the way to the box
EXIT_CODES = """\b
Exit codes:
  0  done
  2  an input is wrong
  3  the machine is unreachable, or not the pinned one
  4  the machine is unfit
  5  the deadline passed, the work goes on (a warning in our GitHub action)
  6  the run failed
  7  a corpus gate failed
  8  refused: not confirmed, or something is at work
  9  not ready, or incomplete
"""


class ProjectGroup(click.Group):
    """Turns expected failures into three lines on stderr and their own exit code; a bug keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        from corpus_builder.errors import ProjectError

        try:
            return super().invoke(ctx)
        except ProjectError as error:
            from controller.invocation import choose_lang, fail

            ctx.exit(fail("zy", error, _around(), choose_lang(None, os.environ)))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Refuse an unknown name before click takes one with a leading dash for an option."""
        if self.get_command(ctx, args[0]) is None:
            from controller.inputs import check_action

            check_action(args[0])
        return super().resolve_command(ctx, args)


def _around() -> Surroundings:
    from controller.invocation import Surroundings

    return Surroundings(os.environ, sys.stdout, sys.stderr)


@click.group(cls=ProjectGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zyforge", prog_name="zy")
def zy() -> None:
    """Fine-tune a chat model on your own documents and dialogs, on a GPU machine that you rent.

    The same actions that the workflow page offers. Settings come from the environment (docs/settings.md).
    """
    if os.environ.get("ZY_INPUT_ACTION") is not None:  # our composite action offers its actions and no more
        from controller.inputs import check_action

        check_action(os.environ["ZY_INPUT_ACTION"])


def box_options(command: Command) -> Command:
    """Give a command the options that every action has."""
    for option in (
        click.option("--lang", type=click.Choice(["zh", "en"]), help="Language of output; default: ZY_LANG, else zh."),
        click.option("--json", "is_json", is_flag=True, help="Print the result as JSON; log lines go to stderr."),
        click.option("--dry-run", "is_dry_run", is_flag=True, help="Print the steps and why; change nothing."),
        click.option(
            "--box", "box_kind", type=click.Choice(["ssh", "local"]), default="ssh", show_default=True,
            help="The machine of ZY_GPU_HOST over SSH, or this one.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def setup_options(command: Command) -> Command:
    """Give a command the options of what to build and how to train."""
    for option in (
        click.option("--repo-root", help="Where the plan's paths start; default: the checkout, else this folder."),
        click.option(
            "--set", "sets", multiple=True, metavar="KEY=VALUE",
            help="Override a key of the recipe, or of the plan with plan.KEY=VALUE; repeatable.",
        ),
        click.option(
            "--dialog-zip", help="Dialog ZIP: https, s3 or cos address, a path on the machine, or file:PATH of yours."
        ),
        click.option("--base-model-dir", help="Folder of the base model on the machine."),
        click.option("--recipe", help="Name of a shipped recipe, or path of a YAML file; default: coding_v1."),
    ):  # fmt: skip
        command = option(command)
    return command


def _perform(action: str, *, given: dict[str, Any] | None = None, **options: Any) -> None:
    """Run one action and leave with its exit code."""
    texts = {name: str(value) for name, value in (given or {}).items() if value is not None}
    with _dialing(action, options["box_kind"]) as dialed:
        from controller.invocation import Options, perform

        code = perform(action, Options(given=texts, **options), _around(), dialed=dialed)
    sys.exit(code)


@contextmanager
def _dialing(action: str, box_kind: str) -> Iterator[Dialed | None]:
    """Begin the connection that a quick action is going to need, before the rest is imported."""
    from controller.addresses import first_hop

    hop = first_hop(os.environ) if action in QUICK and box_kind == "ssh" else None
    if hop is None:
        yield None
        return
    from controller.dial import Dialed

    dialed = Dialed(*hop, os.environ.get("ZY_GPU_KNOWN_HOSTS", ""))
    try:
        import controller.box  # noqa: F401  # first, that the keys be exchanged while settings and pages are imported

        yield dialed
    finally:
        dialed.close()


@zy.command("setup-only")
@box_options
@setup_options
@click.option("--fresh-zip", is_flag=True, help="Fetch the dialog ZIP again although the machine has it.")
def setup_only(
    recipe: str | None,
    base_model_dir: str | None,
    dialog_zip: str | None,
    fresh_zip: bool,
    sets: tuple[str, ...],
    **options: Any,
) -> None:
    """Bring code and sources, fetch dialogs, prepare the environment, build the corpus; start no training."""
    given = {"recipe": recipe, "base_model_dir": base_model_dir, "dialog_zip": dialog_zip}
    given["fresh_zip"] = "true" if fresh_zip else None
    _perform("setup-only", given=given, sets=sets, **options)


@zy.command("setup-and-train")
@box_options
@setup_options
@click.option("--fresh-zip", is_flag=True, help="Fetch the dialog ZIP again although the machine has it.")
@click.option("--confirm", is_flag=True, help="Really start a training.")
@click.option("--watch-minutes", type=click.IntRange(0, 340), help="Follow the run this long; default: 340.")
def setup_and_train(
    recipe: str | None,
    base_model_dir: str | None,
    dialog_zip: str | None,
    fresh_zip: bool,
    confirm: bool,
    watch_minutes: int | None,
    **options: Any,
) -> None:
    """Do what setup-only does, check the gates, start a training and follow it."""
    given: dict[str, Any] = {"recipe": recipe, "base_model_dir": base_model_dir, "dialog_zip": dialog_zip}
    given |= {"confirm_override": "true" if confirm else None, "watch_minutes": watch_minutes}
    given["fresh_zip"] = "true" if fresh_zip else None
    _perform("setup-and-train", given=given, **options)


@zy.command()
@box_options
def status(**options: Any) -> None:
    """Say how the machine, its run and its setup stand; change nothing."""
    _perform("status", **options)


@zy.command("tail-log")
@box_options
@click.option("--from-offset", metavar="CURSOR", help="Read on from here: a byte, or the cursor of an earlier answer.")
@click.option("--follow", is_flag=True, help="Print on until the run or setup ends, or the deadline.")
@click.option("--watch-minutes", type=click.IntRange(0, 340), help="The deadline of --follow; default: 340.")
def tail_log(from_offset: str | None, follow: bool, watch_minutes: int | None, **options: Any) -> None:
    """Show the last 12,000 bytes of the newest log, or what follows a cursor; change nothing."""
    given = {"from_offset": from_offset, "follow": "true" if follow else None, "watch_minutes": watch_minutes}
    _perform("tail-log", given=given, **options)


@zy.command()
@box_options
@click.option(
    "--grace-minutes", type=click.FloatRange(0, 10), default=10.0, show_default=True,
    help="How long to wait for a checkpoint before force; a run itself gives up after its own 10.",
)  # fmt: skip
def kill(**options: Any) -> None:
    """End the run and the setup on the machine, with a checkpoint where there is time for one."""
    _perform("kill", **options)


@zy.command()
@box_options
@setup_options
def doctor(
    recipe: str | None, base_model_dir: str | None, dialog_zip: str | None, sets: tuple[str, ...], **options: Any
) -> None:
    """Try every secret and setting alone, say all that is wrong and what to do; log in and read, change nothing."""
    given = {"recipe": recipe, "base_model_dir": base_model_dir, "dialog_zip": dialog_zip}
    _perform("doctor", given=given, sets=sets, **options)


@zy.group()
def corpus() -> None:
    """Work with a corpus on this machine."""


@corpus.command("build")
@click.option("--plan", "plan_name", required=True, help="Name of a shipped plan, or path of a YAML file.")
@click.option("--base-model-dir", required=True, help="Folder with the base model's tokenizer.")
@click.option("--dialog-dir", help="Folder of dialog Markdown files.")
@click.option("--max-seq-len", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens per sample.")
@click.option("--repo-root", default=".", show_default=True, help="Where the plan's paths start.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key of the plan; repeatable.")
@click.option("--out", default="corpus-out", show_default=True, help="Folder for samples, manifest and report.")
@click.option("--json", "is_json", is_flag=True, help="Print the manifest as JSON; log lines go to stderr.")
@click.option("--lang", type=click.Choice(["zh", "en"]), help="Language of output; default: ZY_LANG, else zh.")
def corpus_build(**options: Any) -> None:
    """Build a corpus from files on this machine, and print the counts per class."""
    from controller.corpus_build import CorpusWish, perform

    sys.exit(perform(_around(), CorpusWish(**options)))


@corpus.command("preview")
@click.option("--out", default="corpus-out", show_default=True, help="Folder that `zy corpus build` wrote.")
@click.option("--class", "wanted", type=click.Choice(["soul", "relation", "tool", "data"]), help="Only this class.")
@click.option("--rows", type=click.IntRange(0, 1000), default=2, show_default=True, help="Samples of each class.")
@click.option("--lang", type=click.Choice(["zh", "en"]), help="Language of output; default: ZY_LANG, else zh.")
def corpus_preview(**options: Any) -> None:
    """Show the counts of a built corpus and some of its samples, the trained turns marked."""
    from controller.corpus_view import preview

    sys.exit(preview(_around(), **options))


@corpus.command("report")
@click.option("--out", default="corpus-out", show_default=True, help="Folder that `zy corpus build` wrote.")
@click.option("--lang", type=click.Choice(["zh", "en"]), help="Language of the page; default: ZY_LANG, else zh.")
def corpus_report(**options: Any) -> None:
    """Write the HTML report of a built corpus again, in another language, and print where it lies."""
    from controller.corpus_view import report

    sys.exit(report(_around(), **options))


@zy.command()
@click.argument("recipe", required=False)
@click.option("--resume", metavar="RUN_ID", help="Go on with a run by its own recipe; an ended one in a new run.")
@click.option("--data", default="train-out", show_default=True, help="Folder for runs, checkpoints and logs.")
@click.option("--samples", help="Samples to train on; default: the corpus in the data folder.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe; repeatable.")
@click.option("--dry-run", "is_dry_run", is_flag=True, help="Print the preflight and the command; change nothing.")
@click.option("--lang", type=click.Choice(["zh", "en"]), help="Language of output; default: ZY_LANG, else zh.")
def train(recipe: str | None, resume: str | None, **options: Any) -> None:
    """Train on this machine by RECIPE: the name of a shipped one, or the path of a YAML file."""
    if (recipe is None) == (resume is None) or (resume is not None and (options["sets"] or options["samples"])):
        raise click.UsageError("give RECIPE with its options, or --resume RUN_ID alone")
    from controller.train_here import TrainWish, perform

    sys.exit(perform(_around(), TrainWish(recipe=recipe, resume=resume, **options)))


@zy.command()
@click.option("--out", default="demo-out", show_default=True, help="Folder for everything that the demo makes.")
@click.option("--tiny", "is_tiny", is_flag=True, help="Train a tiny random model: the whole way, no knowledge.")
@click.option("--lang", type=click.Choice(["zh", "en"]), default="en", show_default=True, help="Language of output.")
def demo(out: str, is_tiny: bool, lang: str) -> None:
    """Do the whole job on this machine: sshd, storage, corpus, training, answers before and after."""
    from pathlib import Path

    from controller.demo import run_demo

    sys.exit(run_demo(Path(out), is_tiny=is_tiny, lang=lang))


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Chinese must not stop an action
    zy()


if __name__ == "__main__":
    main()
