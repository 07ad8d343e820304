"""The commands of `secateur` and their options. This module imports no torch: `actions` is imported when a command runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from .. import __version__
from .._text import percent_hint
from . import running

RECIPES = Path(__file__).parents[1] / "recipes"


class Commands(click.Group):
    """A group that lists its commands in the order of use, and answers a wrong command line in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def main(self, args: Sequence[str] | None = None, *others: Any, standalone_mode: bool = True, **options: Any) -> Any:
        if not standalone_mode:
            return super().main(args, *others, standalone_mode=False, **options)
        code: Any = 0
        try:
            code = super().main(args, *others, standalone_mode=False, **options)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            help_of = getattr(getattr(error, "ctx", None), "command_path", "secateur")
            words = sys.argv[1:] if args is None else args
            text = running.unknown_option(error) if isinstance(error, click.NoSuchOption) else error.format_message()
            message = f"{text.removesuffix('.')} (see {help_of} --help)"
            running.end(message, "--json" in words, error.exit_code)
        sys.exit(code if isinstance(code, int) else 0)


# --- options that several commands share --------------------------------------------------------------------------------


def _options(*options: Callable[..., Any]) -> Callable[..., Any]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def _complete_recipe(ctx: click.Context, parameter: click.Parameter, begin: str) -> list[str]:
    return [file.stem for file in sorted(RECIPES.glob("*.yaml")) if file.stem.startswith(begin)]


def _complete_path(ctx: click.Context, parameter: click.Parameter, begin: str) -> list[CompletionItem]:
    return [CompletionItem(begin, type="file")]  # the shell completes it


class Fraction(click.FloatRange):
    """A range of fractions. The error for 50 or 50% says that 50 % is 0.5."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(error.message.removesuffix(".") + percent_hint(value), param, ctx)


@cache
def _options_by_name() -> dict[str, str]:
    """Every option that takes an argument of a function, by the name of that argument."""
    parameters = [option for one in main.commands.values() for option in one.params if isinstance(option, click.Option)]
    named = {option.name: max(option.opts, key=len) for option in parameters if option.name}
    return {"types": "--set types", **named}  # messages name this argument, which has no option of its own


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Show no progress.")
checkpoint_option = click.option(
    "--checkpoint",
    metavar="PATH",
    help="Weights for module:factory: a file, or a folder of secateur.",
    shell_complete=_complete_path,
)
model_options = _options(click.argument("model", metavar="MODEL", shell_complete=_complete_path), checkpoint_option)
inputs_options = _options(
    click.option("--inputs", metavar="SHAPE", help="Example inputs: a shape such as 1x3x224x224, or module:factory."),
    click.option(
        "--data",
        metavar="DATA",
        help="Batches: module:factory, a folder of images, or a text file.",
        shell_complete=_complete_path,
    ),
    click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Of images and texts."),
    click.option("--batches", type=click.IntRange(1), default=16, show_default=True, help="How many batches are used."),
    click.option("--size", metavar="HxW", default="224x224", show_default=True, help="Of images, which are resized."),
    click.option("--length", type=click.IntRange(2), default=128, show_default=True, help="Tokens in each text sequence."),
    click.option(
        "--tokenizer",
        metavar="PATH",
        help="For a text file. Default: the one in the folder of the model.",
        shell_complete=_complete_path,
    ),
)
output_options = _options(
    click.option(
        "--output", "-o", metavar="PATH", help="The folder to write, or a .safetensors file.", shell_complete=_complete_path
    ),
    click.option("--force", is_flag=True, help="Replace what is there."),
)
loss_option = click.option(
    "--loss", metavar="NAME", help="A function of torch.nn.functional, for criteria that need gradients."
)
set_option = click.option("--set", "others", multiple=True, metavar="NAME=VALUE", help="Any other argument of the function.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would be done, and write nothing.")
stage_options = _options(
    click.option("--exclude", multiple=True, metavar="GLOB", help="Names that stay as they are. Can be repeated."),
    loss_option,
    set_option,
    dry_run_option,
)
evaluate_option = click.option(
    "--evaluate", metavar="MODULE:FUNCTION", help="Called with the model before and after; returns a number."
)


def command(group: click.Group, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a command of a function that returns its work as a function of no arguments. Adds `--json` and `--quiet`."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        @group.command(name)
        @json_option
        @quiet_option
        @wraps(function)
        def call(as_json: bool, quiet: bool, **options: Any) -> None:
            def work() -> running.Answer:
                if quiet:
                    from ..progress import set_progress

                    set_progress(False)
                return function(**options)

            running.run(work, as_json, _options_by_name())

        return call

    return make


# --- the commands -------------------------------------------------------------------------------------------------------


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="secateur")
def main() -> None:
    """Prunes PyTorch models: fewer weights, smaller files, less time.

    MODEL is a Hugging Face folder, module:factory (a function that builds the model, with --checkpoint for its weights), a
    .safetensors or state-dict file, or a folder that secateur wrote.

    Exit codes: 0 done, 1 failed, 2 the command line is wrong, 130 interrupted.
    """


@command(main)
@model_options
@inputs_options
@click.option("--bench", is_flag=True, help="Also measure the time of one call.")
@click.option("--all", "every", is_flag=True, help="List biases and norms too.")
def inspect(**options: Any) -> running.Answer:
    """Show what is in a model.

    For each weight: shape, zeros and their pattern, whether it can be pruned, and if not, why.
    """
    from . import actions

    return actions.inspect(**options)


@command(main)
@model_options
@click.option("--sparsity", type=Fraction(0, 1), help="The fraction of the weights to prune.")
@click.option("--pattern", metavar="PATTERN", help="unstructured, 2:4, 16x1, out, in, ...")
@click.option("--criterion", metavar="CRITERION", help="magnitude, wanda, taylor, 'abs(weight*grad)', ...")
@click.option("--scope", type=click.Choice(["tensor", "row", "global"]), help="Which weights compete.")
@click.option("--method", metavar="METHOD", help="rank, flow, loss, sparsegpt, 'sparsegpt(damp=0.05)', ...")
@click.option("--spread", metavar="SPREAD", help="uniform, erk, owl, 'owl(0.1)'.")
@click.option("--include", multiple=True, metavar="GLOB", help="Names to prune. Can be repeated.")
@click.option("--from-disk", is_flag=True, help="Prune a folder of any size, a part at a time (sc.prune_folder).")
@stage_options
@inputs_options
@evaluate_option
@output_options
def prune(**options: Any) -> running.Answer:
    """Set weights to zero (sc.prune_)."""
    from . import actions

    names = ("sparsity", "pattern", "criterion", "scope", "method", "spread", "include")
    return actions.prune_from_disk(names, options) if options.pop("from_disk") else actions.stage("prune", names, options)


@command(main)
@model_options
@click.option("--channels", type=Fraction(), metavar="FLOAT", help="The fraction of channels that remains.")
@click.option("--params", type=Fraction(), metavar="FLOAT", help="The fraction of parameters that remains.")
@click.option("--flops", type=Fraction(), metavar="FLOAT", help="The fraction of FLOPs that remains.")
@click.option("--latency", type=Fraction(), metavar="FLOAT", help="The fraction of the measured time that remains.")
@click.option("--depth", type=Fraction(), metavar="FLOAT", help="The fraction of blocks that remains.")
@click.option("--criterion", metavar="CRITERION", help="magnitude, fpgm, bn_scale, reconstruction, ...")
@click.option("--multiple-of", type=click.IntRange(1), help="Sizes that are multiples of it stay multiples.")
@click.option("--refit", is_flag=True, default=None, help="Fit the layers after the cut to the original, on --data.")
@click.option("--reestimate", is_flag=True, default=None, help="Measure the statistics of BatchNorm again, on --data.")
@stage_options
@inputs_options
@evaluate_option
@output_options
def shrink(**options: Any) -> running.Answer:
    """Remove channels, heads or blocks (sc.shrink)."""
    from . import actions

    names = ("channels", "params", "flops", "latency", "depth", "criterion", "multiple_of", "refit", "reestimate")
    return actions.stage("shrink", names, options)


@command(main)
@model_options
@click.option("--objective", type=click.Choice(["speed", "size"]), help="The fastest format, or the smallest.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads to measure with.")
@click.option("--store", type=click.Choice(["bfloat16", "float16"]), help="Store float32 weights in half the bytes, rounded.")
@set_option
@dry_run_option
@inputs_options
@evaluate_option
@output_options
def compress(**options: Any) -> running.Answer:
    """Use sparse formats for pruned layers (sc.compress_)."""
    from . import actions

    return actions.stage("compress", ("objective", "threads", "store"), options)


@command(main)
@click.argument("models", metavar="MODEL...", nargs=-1, required=True, shell_complete=_complete_path)
@checkpoint_option
@inputs_options
@click.option("--threads", type=click.IntRange(1), help="CPU threads. Default: torch's number.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True, help="For each model.")
def bench(**options: Any) -> running.Answer:
    """Measure the time of one or several models."""
    from . import actions

    return actions.bench(**options)


@command(main)
@click.argument("before", metavar="BEFORE", shell_complete=_complete_path)
@click.argument("after", metavar="AFTER", shell_complete=_complete_path)
@click.option("--checkpoint", metavar="PATH", help="Weights of BEFORE, if it is module:factory.")
@inputs_options
@evaluate_option
@click.option("--metric", metavar="NAME", help="What --evaluate measures: accuracy, perplexity, ...")
@click.option("--samples", type=click.IntRange(1), help="How many samples --evaluate uses, for the interval of an accuracy.")
@click.option("--name", metavar="NAME", help="The name of the model in the report.")
@click.option("--seconds", type=click.FloatRange(0), default=1.0, show_default=True, help="To time each model; 0: no times.")
@click.option("--output", "-o", metavar="FILE", default="report.html", show_default=True, help="An .html or .json file.")
def report(**options: Any) -> running.Answer:
    """Compare a model before and after (sc.report).

    With --data that has labels, accuracy or perplexity is measured on it. A folder that secateur wrote, or a file of
    weights, is loaded into the module:factory of the other model.
    """
    from . import actions

    return actions.report(**options)


@main.group(cls=Commands, invoke_without_command=True)
@click.pass_context
def recipes(ctx: click.Context) -> None:
    """List, show, check and run recipe files. Without a command, list them."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_recipes)


@command(recipes, "list")
def list_recipes() -> running.Answer:
    """List the recipes that ship with the package."""
    from . import actions

    return actions.list_recipes()


@command(recipes, "show")
@click.argument("recipe", shell_complete=_complete_recipe)
@click.option("--output", "-o", metavar="FILE", help="Write it to a file.")
def show_recipe(recipe: str, output: str | None) -> running.Answer:
    """Show a recipe: a file, a name of the package, or the recipe that made the model in a folder."""
    from . import actions

    return actions.show_recipe(recipe, output)


@command(recipes, "check")
@click.argument("files", nargs=-1, required=True, shell_complete=_complete_path)
def check_recipes(files: tuple[str, ...]) -> running.Answer:
    """Check recipe files: every field and value."""
    from . import actions

    return actions.check_recipes(files)


@command(recipes, "run")
@click.argument("recipe", shell_complete=_complete_recipe)
@model_options
@loss_option
@dry_run_option
@inputs_options
@evaluate_option
@output_options
def run_recipe(recipe: str, **options: Any) -> running.Answer:
    """Run a recipe on a model and save the result."""
    from . import actions

    return actions.run_recipe(recipe, options)


@command(main)
@click.option("--output", "-o", metavar="FOLDER", help="Keep the model and a report in this folder.")
def demo(output: str | None) -> running.Answer:
    """Make a small network smaller in three ways.

    It is trained here, on made-up pictures, and needs no files.
    """
    from . import demo as example

    return example.run(output)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    For bash: eval "$(secateur completion bash)".
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(main, {}, "secateur", "_SECATEUR_COMPLETE").source())
