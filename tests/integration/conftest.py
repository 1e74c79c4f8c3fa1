"""What the tests of whole runs share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.runtime.pipeline import Pipeline


@pytest.fixture
def die_after(monkeypatch) -> Callable[[int, Callable[[], object]], None]:
    """Run something whose controller dies right after a step, as a kill would have it."""

    class Killed(BaseException):
        pass

    def run(step: int, start: Callable[[], object]) -> None:
        whole_step = Pipeline._step

        async def dies(self, groups):
            result = await whole_step(self, groups)
            if result.step == step:
                raise Killed
            return result

        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, "_step", dies)
            with pytest.raises(Killed):
                start()

    return run
