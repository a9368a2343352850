"""The offline stand-in for MNIST: 70,000 digits drawn from matplotlib's fonts, distorted, and kept as IDX files."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common.data.cache import cache_dir
from common.data.idx import IdxError, write_idx
from common.data.mnist import MNIST_FILES, md5
from common.files import discard_draft, new_draft, replace_folder

SEED = 1
SIZES = {"train": 60_000, "t10k": 10_000}
CHECKSUMS = "md5.json"
VERSION = 1  # of the drawing: another version is another cache

_GLYPH = 64  # side of a glyph, in pixels, before it is distorted and reduced to 28
# The font files of matplotlib: each family's name with the endings of its styles.
_STYLES = {
    "DejaVuSans": ["", "-Bold", "-Oblique", "-BoldOblique"],
    "DejaVuSansMono": ["", "-Bold", "-Oblique", "-BoldOblique"],
    "DejaVuSerif": ["", "-Bold", "-Italic", "-BoldItalic"],
    "STIXGeneral": ["", "Bol", "Italic", "BolIta"],
    "cm": ["r10", "ss10", "tt10", "b10"],
}
_FONTS = [f"{family}{style}.ttf" for family, styles in _STYLES.items() for style in styles]


def synthetic_folder() -> Path:
    """The folder with the synthetic digits as four IDX files, drawn now if they are not cached.

    It ends in MNIST/raw, so that `torchvision.datasets.MNIST(folder.parent.parent)` reads it; `md5.json` beside the
    files holds their checksums. A cache appears under its name only when it is complete; what a killed process left
    of one is swept by the next.
    """
    root = cache_dir() / f"synthetic-v{VERSION}"
    raw = root / "MNIST" / "raw"
    if not raw.exists():
        drawing = new_draft(root.parent)
        try:
            _write(drawing / "MNIST" / "raw")
            replace_folder(drawing, root)
        finally:
            discard_draft(drawing)
    return raw


def checksums_of_synthetic(raw: Path) -> dict[str, str]:
    """The md5 of each of the four files in `raw`, as they were drawn.

    Raises:
        IdxError: if the file with the checksums is damaged.
    """
    path = raw / CHECKSUMS
    try:
        checksums = json.loads(path.read_text())
    except ValueError as error:
        raise IdxError(f"{path} is damaged: {error}") from error
    if not isinstance(checksums, dict) or checksums.keys() != set(MNIST_FILES):
        raise IdxError(f"{path} is damaged: it does not name the four files")
    return checksums


def _write(raw: Path) -> None:
    raw.mkdir(parents=True)
    for part, (images, labels) in draw_sets(SEED, SIZES).items():
        write_idx(raw / f"{part}-images-idx3-ubyte", images)
        write_idx(raw / f"{part}-labels-idx1-ubyte", labels)
    checksums = {name: md5(raw / name) for name in MNIST_FILES}
    (raw / CHECKSUMS).write_text(json.dumps(checksums))


def draw_sets(seed: int, sizes: dict[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """For each part: uint8 images (n, 28, 28) and uint8 labels (n,), a function of `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    glyphs = _glyphs()
    return {part: _draw(n, glyphs, generator) for part, n in sizes.items()}


def _glyphs() -> Tensor:
    """Every digit in every font as smooth ink (fonts, 10, 64, 64), 0 to 1, centred, its larger side half the frame."""
    from matplotlib import get_data_path
    from matplotlib.ft2font import FT2Font

    folder = Path(get_data_path()) / "fonts" / "ttf"
    glyphs = torch.zeros(len(_FONTS), 10, _GLYPH, _GLYPH)
    for f, name in enumerate(_FONTS):
        font = FT2Font(str(folder / name))
        font.set_size(48, 72)
        for digit in range(10):
            font.set_text(str(digit))
            font.draw_glyphs_to_bitmap()
            ink = torch.tensor(font.get_image(), dtype=torch.float32) / 255
            glyphs[f, digit] = _framed(_cropped(ink))
    # Blurred ink cut at a level of one's choice is a thinner or a thicker stroke.
    return _blur(glyphs.view(-1, 1, _GLYPH, _GLYPH), sigma=1.6).view_as(glyphs)


def _cropped(ink: Tensor) -> Tensor:
    """The part of an (H, W) image between its first and its last row and column with ink."""
    rows = ink.amax(dim=1).nonzero()
    columns = ink.amax(dim=0).nonzero()
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _framed(ink: Tensor) -> Tensor:
    """An (H, W) image in the middle of a (64, 64) frame, scaled so that its larger side is half of the frame's."""
    scale = _GLYPH / 2 / max(ink.shape)
    height = max(1, round(ink.shape[0] * scale))
    width = max(1, round(ink.shape[1] * scale))
    scaled = F.interpolate(ink[None, None], size=[height, width], mode="bilinear", antialias=True)
    top = (_GLYPH - height) // 2
    left = (_GLYPH - width) // 2
    frame = torch.zeros(_GLYPH, _GLYPH)
    frame[top : top + height, left : left + width] = scaled[0, 0]
    return frame


def _blur(images: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of (N, 1, H, W) images; `sigma` in pixels."""
    reach = int(3 * sigma)
    kernel = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    images = F.conv2d(images, kernel.view(1, 1, -1, 1), padding=(reach, 0))
    return F.conv2d(images, kernel.view(1, 1, 1, -1), padding=(0, reach))


def _draw(n: int, glyphs: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.randint(10, (n,), generator=generator)
    fonts = torch.randint(len(glyphs), (n,), generator=generator)
    images = torch.empty(n, 28, 28, dtype=torch.uint8)
    for start in range(0, n, 2000):
        part = slice(start, start + 2000)
        images[part] = _distort(glyphs[fonts[part], labels[part]], generator)
    return images, labels.to(torch.uint8)


def _distort(glyphs: Tensor, generator: torch.Generator) -> Tensor:
    """Random affine map, local warp, stroke width and noise: (n, 64, 64) smooth ink to (n, 28, 28) uint8."""
    n = len(glyphs)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n).uniform_(low, high, generator=generator)

    angle, shear = uniform(-0.4, 0.4), uniform(-0.3, 0.3)
    width, height = uniform(0.55, 1.0), uniform(0.6, 0.9)
    # Rows of the map from the 28×28 frame back into the glyph's frame: rotate and shear, then shrink or stretch.
    cos, sin = angle.cos(), angle.sin()
    shift_across = uniform(-0.14, 0.14)
    shift_down = uniform(-0.14, 0.14)
    across = torch.stack([cos + shear * sin, -sin + shear * cos, shift_across], dim=1)
    across = across * width[:, None]
    down = torch.stack([sin, cos, shift_down], dim=1)
    down = down * height[:, None]
    grid = F.affine_grid(torch.stack([across, down], dim=1), [n, 1, 28, 28], align_corners=False)
    bends = torch.empty(n, 2, 4, 4).uniform_(-1, 1, generator=generator) * uniform(0, 0.11).view(-1, 1, 1, 1)
    grid = grid + F.interpolate(bends, size=28, mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
    ink = F.grid_sample(glyphs.unsqueeze(1), grid, align_corners=False).squeeze(1)

    level, softness = uniform(0.2, 0.5), uniform(0.04, 0.1)
    ink = torch.sigmoid((ink - level.view(-1, 1, 1)) / softness.view(-1, 1, 1))
    # Anything further than this from the stroke would be a grey veil over the background.
    ink = (ink * uniform(0.6, 1.0).view(-1, 1, 1) - 0.08).clamp(0)
    noise = torch.empty(n, 28, 28).normal_(generator=generator) * uniform(0, 0.16).view(-1, 1, 1)
    return ((ink + noise).clamp(0, 1) * 255).to(torch.uint8)
