"""One plugin: imported, its hooks checked against the specification, its probe asked."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from typing import Final

import pluggy

from sidestream.errors import PluginContractError, PluginLoadError
from sidestream.platforms import hookspecs
from sidestream.platforms.device import Probe

ENTRY_POINT_GROUP: Final = "sidestream.platforms"


def load_hooks(name: str, reference: str) -> pluggy.PluginManager:
    """Import one plugin and give a manager that knows it alone, its hooks checked.

    Raises:
        PluginLoadError: The import raised; ``__cause__`` is what.
        PluginContractError: A hook has an unknown name or argument, or a required one is missing.
    """
    try:
        plugin = EntryPoint(name, reference, ENTRY_POINT_GROUP).load()
    except (Exception, SystemExit) as error:  # the boundary to other people's modules
        raise PluginLoadError(
            f"Plugin {name!r} ({reference}) can't be imported: {_described(error)}",
            plugin=name,
            entry_point=reference,
        ) from error
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        # pluggy names the hook only in its text.
        named = re.search(r"hook '(\w+)'", str(error))
        raise PluginContractError(
            f"Plugin {name!r} ({reference}) does not fit the hook specification: {error}",
            plugin=name,
            hook=named[1] if named else "",
        ) from error
    missing = [hook for hook in hookspecs.REQUIRED_HOOKS if hook not in implemented_hooks(manager)]
    if missing:
        raise PluginContractError(
            f"Plugin {name!r} ({reference}) lacks the required hook(s) {', '.join(missing)}; "
            "a function is a hook only if it is marked with @hookimpl.",
            plugin=name,
            hook=missing[0],
        )
    return manager


def implemented_hooks(manager: pluggy.PluginManager) -> tuple[str, ...]:
    """Name the hooks that the manager's plugin implements, in the order of the specification."""
    callers = (getattr(manager.hook, name, None) for name in vars(hookspecs))
    return tuple(
        hook.name
        for hook in callers
        if isinstance(hook, pluggy.HookCaller) and hook.get_hookimpls()
    )


def ask_probe(name: str, manager: pluggy.PluginManager) -> Probe:
    """Call the plugin's ``probe`` and check its answer.

    Raises:
        PluginContractError: It raised, or answered something else than a probe of its own.
    """

    def broken(what: str) -> PluginContractError:
        return PluginContractError(
            f"Hook probe of plugin {name!r} {what}.", plugin=name, hook="probe"
        )

    try:
        probe = manager.hook.probe()
    except (Exception, SystemExit) as error:  # the boundary to a plugin's code
        raise broken(f"raised, which it never may: {_described(error)}") from error
    if not isinstance(probe, Probe):
        raise broken(f"answered {probe!r} instead of a Probe")
    if probe.name != name:
        raise broken(f"answered for a platform named {probe.name!r}")
    return probe


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
