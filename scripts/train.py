"""Trains a model as a recipe says.

    torchrun --nproc_per_node 4 scripts/train.py RECIPE.toml [--section.key value ...]
    torchrun --nproc_per_node 4 scripts/train.py                 the embedded default: makes its own model and data
    python scripts/train.py RECIPE.toml --dry-run                resolves and checks everything, trains nothing
    python scripts/train.py RECIPE.toml --dry-run --device rtxpro6000 --ranks 4     for a machine that is not here

Every key of the recipe is a flag that wins over the file. A dry run says what a rank needs, what it sends, and whether
it fits; --device is one of a100-80, b200, h100, h200, rtxpro6000. The weights need not be here, nor the data.
"""

import argparse
import signal
import sys
import time
from typing import TYPE_CHECKING

from hymoe.engine.stop import StopFlag

if TYPE_CHECKING:
    from hymoe.engine.devices import Machine, World


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
        return _report(error, here, waits=here.rank > 0, speaks=here.rank == 0, status=2)
    except PeerLost as error:
        return _report(error, here, waits=False, speaks=False, status=1)
    except RunFailed as error:
        return _report(error, here, waits=here.rank > 0, speaks=True, status=1)
    finally:
        if stop is not None:
            stop.leave()


def _run(here: "World", stop: StopFlag | None) -> int:
    import tyro

    from hymoe.engine import recipe as recipes
    from hymoe.engine import run
    from hymoe.engine.demo import demo_recipe
    from hymoe.engine.resolve import resolve

    arguments = sys.argv[1:]
    file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    spelled = {"true": "True", "false": "False"}  # TOML's words are good on the command line too
    arguments = [spelled.get(word, word) for word in arguments]
    machine = _planned(arguments, here)
    given = demo_recipe(here.rank) if file is None else recipes.load(file)
    recipe = tyro.cli(
        recipes.Recipe,
        default=given,
        args=arguments,
        prog="train.py [RECIPE.toml] [--dry-run [--device NAME] [--ranks N]]",
        description=__doc__,
        console_outputs=here.rank == 0,
        config=(tyro.conf.FlagConversionOff,),
    )
    resolved = resolve(recipe, here, machine)
    if stop is not None:
        run.execute(resolved, here, stop)
    elif here.rank == 0:
        print(run.dry_run(resolved))
    return 0


def _planned(arguments: list[str], here: "World") -> "Machine | None":
    """Takes a dry run's flags, which are no keys of a recipe, out of the arguments: the machine; None: a real run."""
    from hymoe.engine.devices import named_machine
    from hymoe.engine.errors import UserError

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--ranks", type=int)
    try:
        flags, arguments[:] = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None
    if flags.dry_run:
        return named_machine(flags.device, flags.ranks, here)
    for name in ("device", "ranks"):
        if getattr(flags, name) is not None:
            raise UserError(
                f"--{name} plans for a machine that is not here; expected --dry-run beside it"
            )
    return None


def _report(error: Exception, here: "World", *, waits: bool, speaks: bool, status: int) -> int:
    """One line from one rank: what all ranks found is said by rank 0, what only another one found by that one.

    Args:
        error: its message is the line.
        here: this rank.
        waits: whether a rank with more to say is given the time.
        speaks: whether this rank says its line whatever others have said.
        status: of the exit, and of the return.
    """
    from hymoe.engine.run import first_to_speak

    if waits:
        # torchrun ends all ranks when the first one leaves; whoever is still here after that is alone with its error.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)
    if first_to_speak(here) or speaks:
        where = f" [rank {here.rank}]" if here.rank else ""
        print(f"train.py:{where} {error}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
