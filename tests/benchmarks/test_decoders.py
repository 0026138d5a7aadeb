"""The table of docs/how-to/predict.md, for the quickest decoder and one that is refused."""

import pytest

from tests.comm.launch import launch


def test_a_row_says_that_a_decoder_is_exact_or_why_it_is_refused() -> None:
    pytest.importorskip("diffusers")
    done = launch(["-m", "benchmarks.decoders", "--only", "AutoencoderTiny", "AutoencoderKLMagvit"])
    assert done.codes == [0, 0], done.stderr
    tiny, magvit = (line.strip("| \n").split(" | ") for line in done.stdout[0].splitlines()[2:])
    assert int(tiny[2].split()[0]) > 0
    assert float(tiny[3]) < 1e-9
    assert tiny[4] == tiny[5]  # bytes, predicted and measured
    assert "module 'conv_in' keeps something in its attribute 'prev_features'" in magvit[2]
