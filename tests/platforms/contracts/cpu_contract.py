from __future__ import annotations

from sidestream.testing.contract import PluginContract


class TestCpu(PluginContract):
    platform_name = "cpu"
