"""The typed facade over one plugin's hooks; the rest of the code never calls a hook itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from sidestream.autoload import without_autoload
from sidestream.errors import (
    MissingDependencyError,
    PlatformError,
    PluginContractError,
    SidestreamError,
)
from sidestream.platforms.device import DeviceEvent, DeviceFault, HostPin, Probe, SideStream
from sidestream.platforms.plugin import ask_probe, load_hooks
from sidestream.platforms.registry import NOOP_NAME, PlatformRegistry

if TYPE_CHECKING:
    import pluggy
    import torch

#: What torch calls a device type from outside, such as npu, before it is told the name.
_UNNAMED_TYPE: Final = "privateuseone"


class Platform:
    """One platform: made by :func:`load_platform`, or in a worker by :func:`load_plugin`.

    Methods that take a device want one of this platform with an index. Whatever a hook raises
    arrives as ``PlatformError`` with the original as ``__cause__`` (errors of sidestream arrive as
    they are), and None from a required hook as ``PluginContractError``.
    """

    def __init__(
        self,
        name: str,
        device_type: str,
        reference: str,
        manager: pluggy.PluginManager,
        *,
        trusts_events: bool = True,
    ) -> None:
        #: The plugin's name.
        self.name: Final = name
        #: The type of its ``torch.device``; ROCm's is "cuda".
        self.device_type: Final = device_type
        #: What a worker imports to get the same plugin.
        self.reference: Final = reference
        self._trusts_events: Final = trusts_events
        self._manager: Final = manager
        self._hooks: Final = manager.hook

    def __repr__(self) -> str:
        return f"<Platform {self.name!r} ({self.reference})>"

    @property
    def is_asynchronous(self) -> bool:
        """Whether there are side streams and events that can be relied on."""
        return self.name != NOOP_NAME and self._trusts_events

    def synchronous(self) -> Platform:
        """Give the same platform without side streams and events, for one whose are not right.

        In place of recording an event it synchronizes the device, and answers None as the no-op
        base does.
        """
        return Platform(
            self.name, self.device_type, self.reference, self._manager, trusts_events=False
        )

    def device(self, index: int = 0) -> torch.device:
        """Give the platform's device of this index; the CPU is one device without an index.

        Until a first ``set_device``, a device type from outside torch is shown as torch's
        placeholder, "privateuseone"; it is the same device.
        """
        import torch

        if self.device_type == "cpu":
            return torch.device("cpu")
        try:
            return torch.device(self.device_type, index)
        except RuntimeError:
            # torch learns the name from the vendor package, and that is imported in set_device.
            return torch.device(_UNNAMED_TYPE, index)

    def set_device(self, device: torch.device) -> None:
        """Bind the calling thread to ``device``; needed once in each thread, before all else.

        Raises:
            PlatformError: Not possible; where the plugin's probe knows why, it says so.
        """
        try:
            self._require_true(self._hooks.set_device, device)
        except PlatformError as error:
            probe = ask_probe(self.name, self._manager)
            if probe.available or probe.reason in str(error):
                raise
            raise PlatformError(
                f"{error} The plugin's probe says: {probe.reason}.", platform=self.name
            ) from (error.__cause__ or error)

    def side_stream(self, device: torch.device, priority: int = 0) -> SideStream | None:
        """Make a stream beside the current one; None where the platform is not asynchronous."""
        if not self._trusts_events:
            return None
        stream: SideStream | None = self._call(
            self._hooks.side_stream, device=device, priority=priority
        )
        if stream is None and self.is_asynchronous:
            raise self._breach(self._hooks.side_stream, None, "a SideStream")
        return stream

    def record_device_event(
        self, device: torch.device, *, timing: bool = False
    ) -> DeviceEvent | None:
        """Record an event on the calling thread's current stream.

        None where the platform is not asynchronous: all that was queued is done then.
        """
        if not self._trusts_events:
            self.synchronize_device(device)
            return None
        event: DeviceEvent | None = self._call(
            self._hooks.record_device_event, device=device, timing=timing
        )
        if event is None and self.is_asynchronous:
            raise self._breach(self._hooks.record_device_event, None, "a DeviceEvent")
        return event

    def synchronize_device(self, device: torch.device) -> None:
        """Block until all work queued on ``device`` is done."""
        self._require_true(self._hooks.synchronize_device, device)

    def check_device(self, device: torch.device) -> DeviceFault | None:
        """Ask for evidence that ``device`` is broken; an exception is such evidence."""
        try:
            fault: DeviceFault | None = self._call(self._hooks.check_device, device=device)
        except SidestreamError as error:
            return DeviceFault(reason=str(error))
        return fault

    def pin_host_memory(self, device: torch.device, address: int, nbytes: int) -> HostPin | None:
        """Page-lock an existing mapping, or answer None where that is not possible."""
        pin: HostPin | None = self._call(
            self._hooks.pin_host_memory, device=device, address=address, nbytes=nbytes
        )
        return pin

    def pinned_buffer(self, device: torch.device, nbytes: int) -> torch.Tensor | None:
        """Allocate a page-locked uint8 tensor, or answer None where that is not possible."""
        buffer: torch.Tensor | None = self._call(
            self._hooks.pinned_buffer, device=device, nbytes=nbytes
        )
        return buffer

    def memory_info(self, device: torch.device) -> tuple[int, int] | None:
        """Give (free, total) bytes of device memory, or None where that is not known."""
        info: tuple[int, int] | None = self._call(self._hooks.memory_info, device=device)
        return info

    def empty_cache(self, device: torch.device) -> None:
        """Give cached, unused device memory back to the device."""
        self._call(self._hooks.empty_cache, device=device)

    def distributed_backend(self) -> str | None:
        """Name the ``torch.distributed`` backend, or answer None where there is none."""
        backend: str | None = self._call(self._hooks.distributed_backend)
        return backend

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """Mark a range in the vendor's profiler; does nothing where there is none."""
        marked: AbstractContextManager[None] | None = self._call(
            self._hooks.profiler_range, name=name
        )
        return nullcontext() if marked is None else marked

    def _call(self, hook: pluggy.HookCaller, /, **arguments: Any) -> Any:
        device: torch.device | None = arguments.get("device")
        if device is not None:
            self._refuse_unfit(device)
        try:
            return hook(**arguments)
        except SidestreamError:
            raise
        except (Exception, SystemExit) as error:  # the boundary to a plugin's code
            where = "" if device is None else f" on {device}"
            raise PlatformError(
                f"Hook {hook.name} of plugin {self.name!r} failed{where}: "
                f"{type(error).__name__}: {error}",
                platform=self.name,
            ) from error

    def _require_true(self, hook: pluggy.HookCaller, device: torch.device) -> None:
        answer = self._call(hook, device=device)
        if answer is not True:
            raise self._breach(hook, answer, "True")

    def _refuse_unfit(self, device: torch.device) -> None:
        # Without an index a vendor's call means the thread's current device, which is 0 in a new
        # thread: the event would be recorded, and the copy queued, on another card.
        is_own = device.type in (self.device_type, _UNNAMED_TYPE)
        if is_own and (device.index is not None or device.type == "cpu"):
            return
        problem = "has no index" if is_own else "is of another type"
        raise PlatformError(
            f"Platform {self.name!r} can't use device '{device}', which {problem}; "
            f"use a device such as '{self.device()}'.",
            platform=self.name,
        )

    def _breach(self, hook: pluggy.HookCaller, answer: object, wanted: str) -> PluginContractError:
        return PluginContractError(
            f"Required hook {hook.name} of plugin {self.name!r} answered {answer!r} instead of "
            f"{wanted}. If it failed, it has to raise.",
            plugin=self.name,
            hook=hook.name,
        )


def load_platform(platform: str | torch.device | None = None) -> Platform:
    """Load the platform of that plugin name or device; None: choose one.

    The order is the argument, ``SIDESTREAM_PLATFORM``, then the one that is available; with none
    available it is ``cpu``. Imports torch, but no vendor package before the device is set.

    Raises:
        PlatformNotFoundError: No plugin has that name, or no available one that device type.
        AmbiguousPlatformError: Several are available and none was named.
        PluginError: The plugin can't be used.
        MissingDependencyError: torch is not installed.
    """
    registry = PlatformRegistry.discover()
    if platform is None or isinstance(platform, str):
        record = registry.select(platform)
    else:
        record = registry.select(device_type=platform.type)
    return load_plugin(record.name, record.reference)


def load_plugin(name: str, reference: str) -> Platform:
    """Load one plugin by its import reference, as a worker does: no discovery, no choice.

    Raises:
        PluginError: It can't be imported or breaks the contract.
        MissingDependencyError: torch is not installed.
    """
    manager = load_hooks(name, reference)
    probe = ask_probe(name, manager)
    _import_torch(probe)
    return Platform(name, probe.device_type, reference, manager)


def _import_torch(probe: Probe) -> None:
    try:
        with without_autoload():
            import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError(
            "torch", f"platform {probe.name!r}", _install_line(probe)
        ) from error


def _install_line(probe: Probe) -> str:
    """Give the line that brings the platform's torch: most vendors' is not on PyPI."""
    start = probe.reason.find("pip install ")
    if probe.available or start < 0:
        return 'pip install "sidestream[cpu]", or your vendor\'s build of torch (README, "Install")'
    return probe.reason[start:]
