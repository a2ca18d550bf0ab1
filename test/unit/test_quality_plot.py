"""Kept figures of `fidelity` as a picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmark.quality import plot


def rows(kl: dict[str, float], count: int = 9, window: int = 64) -> dict:
    """Figures of settings like "mean@128"."""
    settings = {name: name.replace("@", " budget ") + f" page 16 sinks 16 window {window}" for name in kl}
    return {"rows": [{"setting": settings[name], "rows": count, "kl": value} for name, value in kl.items()]}


def test_the_command(tmp_path, capsys):
    """Two files make one line a score; 256 tokens are told in both."""
    first, second, svg = (tmp_path / name for name in ("a.json", "b.json", "c.svg"))
    first.write_text(json.dumps(rows({"mean@128": 0.4, "exact@128": 0.2, "mean@256": 0.1})))
    second.write_text(json.dumps(rows({"mean@256": 0.1, "mean@512": 0.025})))
    assert plot.main([str(first), str(second), "--svg", str(svg)]) == 0
    drawn = ElementTree.parse(svg)
    mean, exact = (line.get("points").split() for line in drawn.findall("{*}polyline"))
    assert len(mean) == 3 and len(exact) == 1
    said = [text.text for text in drawn.findall("{*}text")]
    assert said[-2:] == ["mean", "exact"] and "9 rows" in said[0] and {"128", "256", "512"} < set(said)
    x, y = zip(*(map(float, point.split(",")) for point in mean))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2) and y[1] - y[0] == pytest.approx(y[2] - y[1], abs=0.2)
    assert plot.main([str(first), "--svg", str(svg), "--score", "exact"]) == 0
    assert len(ElementTree.parse(svg).findall("{*}polyline")) == 1
    assert plot.main([str(first), "--svg", str(svg), "--score", "quest"]) == 1
    assert "quest was not measured, only mean, exact" in capsys.readouterr().err
    assert plot.main([str(tmp_path / "none.json"), "--svg", str(svg)]) == 1 and "none.json" in capsys.readouterr().err


@pytest.mark.parametrize("other", [{"count": 8}, {"window": 128}])
def test_what_cannot_be_compared_is_not_drawn_together(other):
    one = rows({"mean@128": 0.4})
    with pytest.raises(ValueError, match=r"a: 9 rows.*and b: "):
        plot.picture({"a": one, "b": rows({"mean@256": 0.2}, **other)})
