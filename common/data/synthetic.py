"""The offline stand-in for MNIST: 70,000 digits drawn from matplotlib's fonts, distorted, and kept in one file."""

import contextlib
import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from common.errors import fail
from common.files import atomic_write

SEED = 1
SIZES = {"train": 60_000, "t10k": 10_000}
VERSION = 2  # Raise it with each change of the drawing or of the file: another version has another cache.

_GLYPH = 64  # A glyph has so many pixels a side before it is distorted and reduced to 28.
# The font files of matplotlib: each family's name with the endings of its styles.
_STYLES = {
    "DejaVuSans": ["", "-Bold", "-Oblique", "-BoldOblique"],
    "DejaVuSansMono": ["", "-Bold", "-Oblique", "-BoldOblique"],
    "DejaVuSerif": ["", "-Bold", "-Italic", "-BoldItalic"],
    "STIXGeneral": ["", "Bol", "Italic", "BolIta"],
    "cm": ["r10", "ss10", "tt10", "b10"],
}
_FONTS = [f"{family}{style}.ttf" for family, styles in _STYLES.items() for style in styles]


def draw_cache() -> Path:
    """The file with the synthetic digits, drawn now if it is not there. It appears only when it is complete."""
    path = _cache_folder() / f"synthetic-v{VERSION}.pt"
    if not path.exists():
        sets = draw_sets(SEED, SIZES)
        with atomic_write(path) as draft:
            torch.save(sets, draft)
    return path


def read_synthetic() -> list[tuple[Tensor, Tensor]]:
    """The training and the test set, each as uint8 images (n, 28, 28) and uint8 labels (n,).

    Raises UserError if the file is damaged.
    """
    path = draw_cache()
    try:
        sets = torch.load(path, weights_only=True)
        return [sets[part] for part in SIZES]
    except Exception as error:  # Of damaged bytes torch.load raises almost anything.
        fail(f"{path} is damaged ({error}): remove it to have the digits drawn again")


def _cache_folder() -> Path:
    """A folder of the user's that can be written to, whatever becomes of `--data-dir`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    folders = []
    if base.is_absolute():  # For a user without a home it is still "~/.cache".
        folders.append(base / "parallelism-ladder")
    folders.append(Path(tempfile.gettempdir()) / f"parallelism-ladder-{os.environ.get('USER', 'user')}")
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    fail(f"neither {base} nor the folder for temporary files can be written to; set XDG_CACHE_HOME")


def draw_sets(seed: int, sizes: dict[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """The digits of each part: uint8 images (n, 28, 28) and uint8 labels (n,).

    The same arguments draw the same digits with the same matplotlib, whose fonts and FreeType make the glyphs.
    """
    generator = torch.Generator().manual_seed(seed)
    glyphs = _glyphs()
    return {part: _draw(n, glyphs, generator) for part, n in sizes.items()}


def _glyphs() -> Tensor:
    """Every digit in every font, blurred: (fonts, 10, 64, 64), from 0 for the background to 1 for ink.

    Each stands in the middle of its frame, and its larger side is half of the frame's.
    """
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
            glyphs[f, digit] = _framed(ink)
    return _blur(glyphs.view(-1, 1, _GLYPH, _GLYPH), sigma=1.6).view_as(glyphs)


def _framed(ink: Tensor) -> Tensor:
    """The part with ink of an (H, W) image in the middle of a (64, 64) frame, whose half is its larger side."""
    rows = ink.amax(dim=1).nonzero()
    columns = ink.amax(dim=0).nonzero()
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
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

    angle = uniform(-0.4, 0.4)
    shear = uniform(-0.3, 0.3)
    width = uniform(0.55, 1.0)
    height = uniform(0.6, 0.9)
    # Rows of the map from the 28×28 frame back into the glyph's frame: rotate and shear, then shrink or stretch.
    cos = angle.cos()
    sin = angle.sin()
    shift_across = uniform(-0.14, 0.14)
    shift_down = uniform(-0.14, 0.14)
    across = torch.stack([cos + shear * sin, -sin + shear * cos, shift_across], dim=1)
    across = across * width[:, None]
    down = torch.stack([sin, cos, shift_down], dim=1)
    down = down * height[:, None]
    grid = F.affine_grid(torch.stack([across, down], dim=1), [n, 1, 28, 28], align_corners=False)
    local_warp = torch.empty(n, 2, 4, 4).uniform_(-1, 1, generator=generator) * uniform(0, 0.11).view(-1, 1, 1, 1)
    grid = grid + F.interpolate(local_warp, size=28, mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
    ink = F.grid_sample(glyphs.unsqueeze(1), grid, align_corners=False).squeeze(1)

    # The sigmoid makes ink of all pixels above `level`. A blurred stroke is thicker at a low level than at a high one.
    level = uniform(0.2, 0.5)
    softness = uniform(0.04, 0.1)
    ink = torch.sigmoid((ink - level.view(-1, 1, 1)) / softness.view(-1, 1, 1))
    # 0.08 removes the faint grey that the sigmoid leaves far from the stroke.
    ink = (ink * uniform(0.6, 1.0).view(-1, 1, 1) - 0.08).clamp(0)
    noise = torch.empty(n, 28, 28).normal_(generator=generator) * uniform(0, 0.16).view(-1, 1, 1)
    return ((ink + noise).clamp(0, 1) * 255).to(torch.uint8)
