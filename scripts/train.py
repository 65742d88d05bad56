"""Trains a model as a recipe says.

    torchrun --nproc_per_node 4 scripts/train.py RECIPE.toml [--section.key value ...]
    torchrun --nproc_per_node 4 scripts/train.py                 the embedded default: makes its own model and data
    python scripts/train.py RECIPE.toml --dry-run                resolves and checks everything, trains nothing

Every key of the recipe is a flag that wins over the file.
"""

import signal
import sys
import time
from typing import TYPE_CHECKING

from hymoe.engine.stop import StopFlag

if TYPE_CHECKING:
    from hymoe.engine.run import World


def main() -> int:
    """Returns the exit status: 0 done or saved and left, 1 the run cannot go on, 2 bad input."""
    # Before torch is imported, which takes seconds: a signal that comes meanwhile is heard later.
    stop = None if {"--dry-run", "--help", "-h"} & set(sys.argv) else StopFlag()
    from hymoe.engine import run
    from hymoe.engine.errors import UserError
    from hymoe.engine.faults import PeerLost, RunFailed

    here = run.world()
    try:
        return _run(here, stop)
    except UserError as error:
        _report(error, here)
        return 2
    except RunFailed as error:
        # What the other ranks see next is only that this one has gone.
        if run.first_to_speak(here) or not isinstance(error, PeerLost):
            _report(error, here, waits=not isinstance(error, PeerLost))
        return 1


def _run(here: "World", stop: StopFlag | None) -> int:
    import tyro

    from hymoe.engine import recipe as recipes
    from hymoe.engine import run
    from hymoe.engine.demo import demo_recipe

    arguments = sys.argv[1:]
    file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    spelled = {"true": "True", "false": "False"}  # TOML's words are good on the command line too
    arguments = [spelled.get(word, word) for word in arguments if word != "--dry-run"]
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
    if stop is not None:
        run.execute(resolved, here, stop)
    elif here.rank == 0:
        print(run.dry_run(resolved, here))
    return 0


def _report(error: Exception, here: "World", waits: bool = True) -> None:
    """One line from one rank: what all ranks found is said by rank 0, what only another one found by that one."""
    rank = here.rank
    if rank and waits:
        # torchrun ends all ranks when the first one leaves; whoever is still here after that is alone with its error.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
    where = f" [rank {rank}]" if rank else ""
    print(f"train.py:{where} {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
