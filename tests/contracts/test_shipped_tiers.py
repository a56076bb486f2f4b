from tiercache.testing import FileTier, MemoryTier, TierContract
from tiercache.tiers.device import DeviceTier
from tiercache.tiers.host import HostTier


class TestDeviceTier(TierContract):
    def create_tier(self, capacity_bytes):
        return DeviceTier(capacity_bytes)


class TestHostTier(TierContract):
    def create_tier(self, capacity_bytes):
        return HostTier(capacity_bytes)


class TestMemoryTier(TierContract):
    def create_tier(self, capacity_bytes):
        return MemoryTier(capacity_bytes)


class TestFileTier(TierContract):
    def create_tier(self, capacity_bytes):
        import tempfile
        from pathlib import Path

        return FileTier(Path(tempfile.mkdtemp()), capacity_bytes)
