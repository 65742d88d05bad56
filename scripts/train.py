"""Trains a model as a recipe says.

    torchrun --nproc_per_node 4 scripts/train.py RECIPE.toml [--section.key value ...]
    torchrun --nproc_per_node 4 scripts/train.py                 the embedded default: makes its own model and data
    python scripts/train.py RECIPE.toml --dry-run                resolves and checks everything, trains nothing

Every key of the recipe is a flag that wins over the file.
"""

import signal
import sys
import time

import tyro

from hymoe.engine import recipe as recipes
from hymoe.engine import run
from hymoe.engine.demo import demo_recipe
from hymoe.engine.errors import UserError


def main() -> int:
    """Returns the exit status: 0 done, 2 bad input."""
    here = run.world()
    arguments = sys.argv[1:]
    file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    dry = "--dry-run" in arguments
    spelled = {"true": "True", "false": "False"}  # TOML's words are good on the command line too
    arguments = [
        spelled.get(argument, argument) for argument in arguments if argument != "--dry-run"
    ]
    try:
        given = demo_recipe(here.rank) if file is None else recipes.load(file)
        recipe = tyro.cli(
            recipes.Recipe,
            default=given,
            args=arguments,
            prog="train.py [RECIPE.toml] [--dry-run]",
            description=__doc__,
            console_outputs=here.rank == 0,
            config=(tyro.conf.FlagConversionOff,),
        )
        resolved = run.resolve(recipe, here)
        if dry:
            if here.rank == 0:
                print(run.dry_run(resolved, here))
            return 0
        run.execute(resolved, here)
    except UserError as error:
        _report(error, here.rank)
        return 2
    return 0


def _report(error: UserError, rank: int) -> None:
    """One line from one rank: what all ranks found is said by rank 0, what only another one found by that one."""
    if rank:
        # torchrun ends all ranks when the first one leaves; whoever is still here after that is alone with its error.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
    where = f" [rank {rank}]" if rank else ""
    print(f"train.py:{where} {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
