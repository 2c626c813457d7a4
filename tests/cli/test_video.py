"""Videos on the disk: MP4 with PyAV, else frames as PNG; whole, and part by part."""

import re
import sys

import numpy as np
import pytest
from PIL import Image

from sidestream import DiffusionEngine, DiffusionRequest, EngineConfig, SamplingParams
from sidestream.cli.main import run
from sidestream.cli.video import FrameFolder, Mp4File, open_video
from sidestream.cli.writer import OutputWriter
from sidestream.models.checkpoint import make_checkpoint
from sidestream.output import DiffusionOutput

pytestmark = pytest.mark.slow

TEXT = {"prompt": "a fox", "seed": "7", "model": "tiny"}


def frames(count, height=32, width=48, first=0):
    """Smooth pictures that differ, so that an encoder loses little of them."""
    columns = np.linspace(0, 200, width).round().astype(np.uint8)
    picture = np.broadcast_to(columns[None, :, None], (height, width, 3))
    return [Image.fromarray(picture + np.uint8(first + index)) for index in range(count)]


def decoded(path):
    av = pytest.importorskip("av")
    with av.open(path) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def same(one, other):
    return np.abs(np.asarray(one).astype(int) - np.asarray(other).astype(int)).mean() < 3


@pytest.fixture
def without_av(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)


class TestMp4:
    def write(self, path, *parts, **options):
        settings = {"fps": 12, "overwrite": False, **options}
        with Mp4File(path, TEXT, **settings) as video:
            for part in parts:
                video.append(part)
        return video

    def test_the_frames_come_back_in_order_at_their_rate_with_their_text(self, tmp_path):
        av = pytest.importorskip("av")
        video = self.write(tmp_path / "a.mp4", frames(5), frames(3, first=50))
        assert video.files == [tmp_path / "a.mp4"]
        for one, other in zip(
            decoded(tmp_path / "a.mp4"), [*frames(5), *frames(3, first=50)], strict=True
        ):
            assert same(one, other)
        with av.open(tmp_path / "a.mp4") as container:
            assert container.streams.video[0].average_rate == 12
            assert container.metadata["title"] == "a fox"
            assert "seed: 7" in container.metadata["comment"]

    def test_what_was_appended_can_be_seen_while_the_rest_is_made(self, tmp_path):
        path = tmp_path / "a.mp4"
        with Mp4File(path, TEXT, fps=24, overwrite=False) as video:
            video.append(frames(4))
            # The latest frame has no end before there is a next one.
            assert len(decoded(path)) >= 3
            video.append(frames(4))
            assert len(decoded(path)) >= 7
        assert len(decoded(path)) == 8

    def test_an_odd_size_will_do(self, tmp_path):
        self.write(tmp_path / "a.mp4", frames(2, height=33, width=17))
        assert decoded(tmp_path / "a.mp4")[0].shape == (33, 17, 3)

    def test_a_file_that_is_there_stays_unless_it_may_go(self, tmp_path):
        path = tmp_path / "a.mp4"
        path.write_bytes(b"mine")
        with pytest.raises(FileExistsError):
            self.write(path, frames(1))
        assert path.read_bytes() == b"mine"
        self.write(path, frames(1), overwrite=True)
        assert len(decoded(path)) == 1

    def test_without_a_frame_there_is_no_file(self, tmp_path):
        self.write(tmp_path / "a.mp4")
        assert list(tmp_path.iterdir()) == []

    def test_an_error_between_two_parts_leaves_what_was_appended(self, tmp_path):
        with pytest.raises(AttributeError, match="convert"):
            self.write(tmp_path / "a.mp4", frames(4), ["no image"])
        assert len(decoded(tmp_path / "a.mp4")) == 4


class TestFrames:
    def test_each_frame_is_a_file_with_its_pixels_and_text(self, tmp_path):
        with FrameFolder(tmp_path / "a", TEXT, overwrite=False) as video:
            video.append(frames(2))
            video.append(frames(1, first=9))
        assert [path.name for path in video.files] == ["00000.png", "00001.png", "00002.png"]
        for path, frame in zip(video.files, [*frames(2), *frames(1, first=9)], strict=True):
            with Image.open(path) as read:
                assert np.array_equal(np.asarray(read), np.asarray(frame))
                assert read.text == TEXT

    def test_a_folder_that_is_there_is_not_written_to(self, tmp_path):
        (tmp_path / "a").mkdir()
        with pytest.raises(FileExistsError):
            FrameFolder(tmp_path / "a", TEXT, overwrite=False)
        FrameFolder(tmp_path / "a", TEXT, overwrite=True)

    def test_it_is_chosen_where_pyav_is_missing(self, without_av, tmp_path):
        video = open_video(tmp_path, "a", TEXT, fps=24, overwrite=False)
        assert isinstance(video, FrameFolder)


def test_the_writer_makes_one_file_of_a_video(tmp_path):
    pixels = np.stack([np.asarray(frame) for frame in frames(3)])
    with OutputWriter(tmp_path, fps=12) as writer:
        writer.submit(DiffusionOutput("r", pixels, post_process="WanPipeline"), "a", TEXT)
        writer.submit(DiffusionOutput("r", pixels), "b", TEXT)
    assert [path.name for path in writer.files] == ["a.mp4", "b_0.png", "b_1.png", "b_2.png"]
    assert (writer.count, writer.videos) == (2, 1)
    assert len(decoded(tmp_path / "a.mp4")) == 3


@pytest.fixture(scope="module")
def helios(tmp_path_factory):
    return make_checkpoint("helios", tmp_path_factory.mktemp("helios") / "checkpoint")


class TestGenerate:
    def generate(self, model, folder, *options):
        command = ["generate", str(model), "--out", str(folder), "--seed", "5", "--steps", "2"]
        return run([*command, "--platform", "cpu", "--executor", "uniproc", *options])

    def test_streamed_a_video_is_saved_chunk_by_chunk(self, helios, tmp_path, capsys):
        assert self.generate(helios, tmp_path, "--prompt", "A cat", "--stream", "--fps", "8") == 0
        shown = capsys.readouterr()
        # Two chunks of 33 frames, of which the library keeps four times something, plus one.
        assert shown.err.splitlines() == [
            "Drawing 1 of 1: 33 frames are saved.",
            "Drawing 1 of 1: 65 frames are saved.",
        ]
        assert re.match(r"Saved 1 video in [\d.]+ s: [\d.]+ videos/s ", shown.out)
        (path,) = tmp_path.iterdir()
        assert path.name == "00000_a-cat_seed5.mp4"
        assert [frame.shape for frame in decoded(path)] == [(32, 32, 3)] * 65

    def test_without_pyav_frames_have_the_engines_pixels(
        self, helios, tmp_path, without_av, capsys
    ):
        (tmp_path / "00003_older_seed1.mp4").touch()
        options = ("--prompt", "A cat", "--num-frames", "33")
        assert self.generate(helios, tmp_path, *options) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith("Saved 1 video as 33 PNG files (for MP4: pip install ")
        params = SamplingParams(num_frames=33, num_inference_steps=2, seed=5)
        config = EngineConfig(model=helios, platform="cpu", executor="uniproc")
        with DiffusionEngine(config) as engine:
            output = engine.submit(DiffusionRequest("A cat", params)).result(timeout=60)
        assert output.is_video
        assert output.output.shape == (33, 32, 32, 3)
        files = sorted((tmp_path / "00004_a-cat_seed5").iterdir())
        for path, frame in zip(files, output.frames, strict=True):
            with Image.open(path) as image:
                assert np.array_equal(np.asarray(image), np.asarray(frame))

    def test_streamed_images_are_saved_as_ever(self, checkpoint, tmp_path, capsys):
        options = ("--prompt", "one", "--prompt", "two", "--stream", "--height", "32")
        assert self.generate(checkpoint, tmp_path, *options) == 0
        assert [path.name for path in sorted(tmp_path.iterdir())] == [
            "00000_one_seed5.png",
            "00001_two_seed6.png",
        ]
        assert capsys.readouterr().err == ""

    def test_a_request_that_fails_is_one_line_when_streamed_too(self, checkpoint, tmp_path, capsys):
        options = ("--prompt", "one", "--stream", "--height", "24")
        assert self.generate(checkpoint, tmp_path, *options) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "height=24" in line
