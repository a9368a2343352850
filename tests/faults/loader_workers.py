"""Two loader workers share batches of 1,500 images with this process."""

import torch
from torch.utils.data import DataLoader

from common.data import DigitImages, collate

digits = DigitImages("none", torch.zeros(6000, 28, 28, dtype=torch.uint8), torch.zeros(6000, dtype=torch.uint8))
for images, _ in DataLoader(digits, 1500, num_workers=2, collate_fn=collate):
    print(len(images), flush=True)
