"""The trainer's arguments choose a rollout source."""

from __future__ import annotations

import pytest
import tiny

from colograd.rollout.features import SourceFeature, source_feature
from colograd.runtime import registry


@pytest.mark.parametrize(("argument", "extension"), [("tools", "tools"), ("agent", "agents")])
def test_argument_of_missing_extension_is_refused(argument, extension, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(registry, "installed", lambda: ())
    arguments = tiny.trainer_arguments(**{argument: [len]})
    with pytest.raises(ValueError, match=f"^{argument} needs the extension `{extension}`, but .* is missing"):
        source_feature(arguments, tiny.config(tmp_path))


def test_without_arguments_the_engine_is_the_source(tmp_path) -> None:
    feature, engine = source_feature(tiny.trainer_arguments(), tiny.config(tmp_path)), object()
    assert type(feature) is SourceFeature
    assert feature.source(engine, None, None, None) is engine  # type: ignore[arg-type]
