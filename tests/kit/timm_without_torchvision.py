"""A stand-in for torchvision with just the names that timm imports, so that timm's models can be built without it.

    subprocess.run([sys.executable, ...], env={**os.environ, "PYTHONPATH": str(stand_in(tmp_path))})

Models run for real, since none of timm's calls torchvision. Images are neither read nor transformed: the datasets and
transforms are empty classes. For other processes only: in this one, other tests must see that torchvision is missing.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "__init__.py": "",
    "datasets.py": """
        class ImageFolder: ...
        CIFAR100 = CIFAR10 = MNIST = KMNIST = FashionMNIST = ImageFolder
    """,
    "ops/__init__.py": "",
    "ops/misc.py": """
        from torch import nn
        class FrozenBatchNorm2d(nn.Module): ...
    """,
    "transforms/__init__.py": """
        class ToTensor: ...
        from torchvision.transforms import functional
    """,
    "transforms/functional.py": """
        from enum import Enum
        class InterpolationMode(Enum):
            NEAREST, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(6)
    """,
}


def stand_in(folder: Path) -> Path:
    """Write the package `torchvision` into a folder, and return the folder."""
    for name, text in FILES.items():
        file = folder / "torchvision" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(line.removeprefix(" " * 8) for line in text.splitlines()))
    return folder
