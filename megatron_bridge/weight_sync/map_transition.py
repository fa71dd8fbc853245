"""Publishing while engines change over from one quant map to another.

An engine keeps the map that it was started with, so after a decision of the ESS controller the engines are started
again, one after the other. Until the last one has the new map, each gets every version in the formats of its own: by
disk, whatever the channel is otherwise.

    all engines have the newest map    the run's channel
    some have an older one             disk: policy/000013, and policy/000013/maps/DIGEST for each older map

Which maps are served is read from the membership at each publish, so that nothing has to be remembered: a learner that
is started again in the middle goes on alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_bridge.weight_sync.disk import DiskChannel
from megatron_bridge.weight_sync.streaming import StreamedChannel
from pipeline.data.quant_maps import digest_of
from precision.formats.quant_map import QuantMap


class MapTransition:
    """Implements pipeline.ports.weights.WeightChannel over a run's channel and a disk channel, which may be the
    same. Every method but `close` is collective."""

    def __init__(
        self,
        usual: DiskChannel | StreamedChannel,
        disk: DiskChannel,
        quant: QuantMap | None,
        older_maps: Callable[[str], Sequence[QuantMap]],
    ) -> None:
        """`older_maps` returns the maps that announced engines have, but for the one with the digest that it is given;
        the same on all ranks."""
        self._usual = usual
        self._disk = disk
        self._quant = quant
        self._older_maps = older_maps
        self._active: DiskChannel | StreamedChannel = usual
        """Which publishes, or did so last."""
        self._maps_served = 1.0

    def use_map(self, quant: QuantMap | None) -> None:
        """Publish in these formats from now on."""
        if quant != self._quant:
            self._quant = quant
            for channel in {id(channel): channel for channel in (self._usual, self._disk)}.values():
                channel.set_map(quant)

    def publish(self, version: int) -> dict[str, float]:
        """See WeightChannel. Also measured: quant_maps_served."""
        self.begin(version, learner_waits=True)
        return self.finish()

    def begin(self, version: int, *, learner_waits: bool = False) -> None:
        """See WeightChannel."""
        older = self._choose()
        if older:
            self._disk.begin(version, older, learner_waits=learner_waits)
        else:
            self._usual.begin(version, learner_waits=learner_waits)

    def is_over(self, wait_s: float) -> bool:
        """See WeightChannel."""
        return self._active.is_over(wait_s)

    def finish(self) -> dict[str, float]:
        """See WeightChannel; measured as `publish` says."""
        return self._with_maps(self._active.finish())

    def _choose(self) -> Sequence[QuantMap]:
        """The maps that some engines have still; afterwards `_active` is the channel for them."""
        older = [] if self._quant is None else self._older_maps(digest_of(self._quant.to_file()))
        if older:
            self._usual.wait_for_folder()
        self._active, self._maps_served = (self._disk if older else self._usual), 1.0 + len(older)
        return older

    def _with_maps(self, measured: dict[str, float]) -> dict[str, float]:
        return {**measured, "quant_maps_served": self._maps_served} if measured else {}

    def wait_for_folder(self) -> None:
        """See WeightChannel."""
        self._usual.wait_for_folder()

    def close(self) -> None:
        """See WeightChannel."""
        self._usual.close()
        if self._disk is not self._usual:
            self._disk.close()
