"""PNG files: right pixels, right metadata, nothing overwritten, encoded on other threads."""

import threading

import numpy as np
import pytest
from PIL import Image

from sidestream.cli.png import write_png
from sidestream.cli.writer import OutputWriter
from sidestream.output import DiffusionOutput


def pixels(seed):
    return np.random.default_rng(seed).integers(0, 256, (1, 24, 32, 3), dtype=np.uint8)


class Batch(DiffusionOutput):
    """An output of several images, which notes the thread that asks for them."""

    @property
    def images(self):
        self.asked_by = threading.current_thread()
        return [Image.fromarray(image) for image in self.output]


def test_pixels_and_metadata_come_back(tmp_path):
    image = Image.fromarray(pixels(1)[0])
    path = tmp_path / "one.png"
    write_png(path, image, {"prompt": "a fox, größer: 🦊", "seed": "7"}, overwrite=False)
    with Image.open(path) as read:
        assert np.array_equal(np.asarray(read), np.asarray(image))
        assert read.text == {"prompt": "a fox, größer: 🦊", "seed": "7"}


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    path = tmp_path / "one.png"
    path.write_bytes(b"somebody's")
    image = Image.fromarray(pixels(1)[0])
    with pytest.raises(FileExistsError):
        write_png(path, image, {}, overwrite=False)
    assert path.read_bytes() == b"somebody's"
    write_png(path, image, {}, overwrite=True)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_each_image_of_an_output_gets_a_file_and_its_own_seed(tmp_path):
    output = Batch("r", np.concatenate([pixels(1), pixels(2)]))
    with OutputWriter(tmp_path) as writer:
        writer.submit(output, "pair", {"prompt": "two", "seed": "40"})
    assert writer.files == [tmp_path / "pair_0.png", tmp_path / "pair_1.png"]
    for index, path in enumerate(writer.files):
        with Image.open(path) as read:
            assert np.array_equal(np.asarray(read), output.output[index])
            assert read.text["seed"] == str(40 + index)


def test_the_thread_that_submits_never_encodes(tmp_path):
    outputs = [Batch("r", pixels(seed)) for seed in range(12)]
    with OutputWriter(tmp_path) as writer:
        for index, output in enumerate(outputs):
            writer.submit(output, f"{index:02d}", {"seed": "0"})
    assert [path.name for path in writer.files] == [f"{index:02d}.png" for index in range(12)]
    assert all(output.asked_by is not threading.current_thread() for output in outputs)


def test_a_failed_write_is_raised_at_the_end_and_the_others_are_there(tmp_path):
    (tmp_path / "1.png").write_bytes(b"in the way")
    writer = OutputWriter(tmp_path)
    for index in range(3):
        writer.submit(Batch("r", pixels(index)), str(index), {"seed": "0"})
    with pytest.raises(FileExistsError, match=r"1\.png"):
        writer.close()
    assert writer.files == [tmp_path / "0.png", tmp_path / "2.png"]
