"""Makes the pictures of the README: real output of shapes-tiny, with changes of the prompt on the way.

python scripts/readme_media.py            (docs/media/switch.webp, animated, and docs/media/sheet.png)

The sheet marks what the judge finds wrong; of the changing video it judges what follows the last change.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parents[1]))

from rfjax import RollingForcingPipeline  # noqa: E402  (the path comes first)
from rfjax.worlds.evaluate import judged_video  # noqa: E402
from rfjax.worlds.shapes import parse  # noqa: E402
from rfjax.worlds.sheet import Row, write_sheet  # noqa: E402

MEDIA = Path(__file__).parents[1] / "docs" / "media"
SEED = 3
SCRIPT = {  # block from which a prompt acts
    0: "a red circle moving right on a blue background",
    9: "a red circle moving down fast on a blue background",
    18: "a red circle still on a blue background",
}
BLOCKS = 26
PROMPTS = (
    "a yellow triangle moving up",
    "a white square moving left fast on a magenta background",
    "a blue circle still on a green background",
    "a cyan square moving down slowly and a red triangle moving right",
)
SCALE, CAPTION = 4, 16


def captioned(frame: np.ndarray, text: str) -> Image.Image:
    picture = Image.fromarray(frame.repeat(SCALE, 0).repeat(SCALE, 1))
    page = Image.new("RGB", (picture.width + 130, picture.height + CAPTION), "white")
    page.paste(picture, (0, CAPTION))
    ImageDraw.Draw(page).text((2, 2), text, fill="black")
    return page


def main() -> None:
    pipe = RollingForcingPipeline.from_pretrained("shapes-tiny", dtype="float32")
    pages, frames = [], []
    with pipe.stream(SCRIPT[0], seed=SEED) as stream:
        for chunk in stream:
            pages += [captioned(frame, str(chunk.prompt)) for frame in chunk.frames[::2]]
            frames.append(chunk.frames)
            if chunk.index + 1 == BLOCKS:
                break
            if prompt := SCRIPT.get(chunk.index + 1):
                stream.set_prompt(prompt)
    MEDIA.mkdir(parents=True, exist_ok=True)
    pages[0].save(
        MEDIA / "switch.webp", save_all=True, append_images=pages[1:], duration=125, loop=0, quality=70, method=4
    )
    last = max(SCRIPT)
    end = np.concatenate(frames[last + 6 :])
    rows = [_row(" -> ".join(SCRIPT.values()), np.concatenate(frames), end, SCRIPT[last])]
    for prompt in PROMPTS:
        video = np.rint(pipe(prompt, num_frames=81, seed=SEED).frames[0] * 255).astype(np.uint8)
        rows.append(_row(prompt, video, video, prompt))
    write_sheet(rows, MEDIA / "sheet.png")


def _row(caption: str, video: np.ndarray, judged: np.ndarray, prompt: str) -> Row:
    return Row(caption, judged_video(judged, parse(prompt), SEED).wrong, video)


if __name__ == "__main__":
    main()
