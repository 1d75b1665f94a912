"""Images as inputs of a network: prepared by the checkpoint's own processor, and computed by the model's own forward.

    images, token ids -> vision encoder -> vectors in place of the placeholders -> decoder -> hidden states

The vision encoder is trained with `model.train_vision` only. Its vectors get positions in two dimensions in families
with `get_rope_index` (Qwen).

A family whose decoder does not read images as it reads text, such as Gemma 3 (where the tokens of an image see each
other in both directions), is found by a comparison of hidden states when the model is loaded.
"""

from __future__ import annotations

import io
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.images import PlacedImage
from ..data.samples import Sample, Segment
from . import attention
from .packing import MicroBatch, pack
from .sequence_parallel import SequenceParallelGroup

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Image files from outside: those that vLLM opens, which Pillow decodes itself. PostScript, for example, would start another
# program.
FORMATS = (
    "AVIF", "BLP", "BMP", "CUR", "DCX", "DDS", "DIB", "FITS", "FLI", "FTEX", "GBR", "GIF", "ICNS", "ICO", "IM", "IMT",
    "IPTC", "JPEG", "JPEG2000", "MCIDAS", "MSP", "PCD", "PCX", "PIXAR", "PNG", "PPM", "PSD", "QOI", "SGI", "SPIDER",
    "SUN", "TGA", "TIFF", "WEBP", "XBM", "XPM", "XVTHUMB",
)  # fmt: skip
REMEMBERED = 65_536  # images whose size in tokens is known
KEPT_BYTES = 2 << 30  # of prepared images, which several passes read: one of a million pixels takes 0.1 s
GRID = "image_grid_thw"  # of Qwen's families: patches of each image in time, height and width
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
PROBE_LAYERS = 2
COMPARED_SIZES = ((64, 96), (128, 64), (640, 480), (1080, 1920))  # of images, in pixels


class UnusableImages(Exception):
    """A model's images cannot be trained on; the message says why."""


class ImageSize(NamedTuple):
    """tokens: placeholders of an image. grid: its patches in time, height and width, [1, 3]; None in most families."""

    tokens: int
    grid: Tensor | None


class ImageReader:
    """How a network reads images.

    Attributes:
        token_id: the placeholder.
        marker: its text, which a chat template writes once for each image.
        example: a sample with images and without trained tokens.

    Raises:
        UnusableImages: the processor cannot be loaded, or the decoder reads images in another way than text.
    """

    def __init__(self, network: PreTrainedModel, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
        kind = network.config.model_type
        token_id = getattr(network.config, "image_token_id", None)
        if not isinstance(token_id, int):
            raise UnusableImages(f"images of {kind} are not supported: its config has no image_token_id")
        self.token_id = token_id
        self.marker = str(tokenizer.convert_ids_to_tokens(self.token_id))
        self._tokenizer = tokenizer
        self._accepted = frozenset(signature(network.base_model.forward).parameters)
        self._merge = int(getattr(network.config.vision_config, "spatial_merge_size", 1))
        self._has_grid = GRID in self._accepted
        self._processor = _load_processor(path, images_only=self._has_grid)
        self._sizes: dict[bytes, ImageSize] = {}  # by the digest of the file
        self._size_of_shape: dict[tuple[int, int], ImageSize] = {}  # by width and height, on which it depends
        self._prepared = _PreparedImages(KEPT_BYTES)
        try:
            self.example = _example(self)
            is_equal = _reads_images_as_text(network, self)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # of a family's own code
            raise UnusableImages(f"images of {kind} are not supported: {_first_line(error)}") from error
        if not is_equal:
            raise UnusableImages(f"images of {kind} are not supported: its decoder reads them in another way than text")

    def count(self, content: bytes) -> int:
        """The number of placeholders of an image.

        Raises:
            ValueError: it cannot be read.
        """
        return self._size(content).tokens

    def identify(self, content: bytes) -> None:
        """Reads the header of an image. Raises ValueError as `count`."""
        _identify(content)

    def _size(self, content: bytes) -> ImageSize:
        digest = _digest(content)
        if digest not in self._sizes:
            if len(self._sizes) >= REMEMBERED:
                self._sizes.clear()
            image = open_image(content)
            if image.size not in self._size_of_shape:
                self._size_of_shape[image.size] = self._measure(image)
            self._sizes[digest] = self._size_of_shape[image.size]
        return self._sizes[digest]

    def _measure(self, image: Image) -> ImageSize:
        try:
            if self._has_grid:
                grid_13: Tensor = self._processor(images=[image], return_tensors="pt")[GRID]
                return ImageSize(int(grid_13.prod()) // self._merge**2, grid_13)
            processor = self._processor
            inputs = processor(text=[self.marker], images=[image], return_tensors="pt")
        except ValueError as error:
            raise ValueError(
                f"the model's processor refuses an image of {image.width}x{image.height}: {error}"
            ) from None
        return ImageSize(int((inputs["input_ids"] == self.token_id).sum()), None)

    def token_ids(self, text: str, contents: Sequence[bytes]) -> list[int]:
        """The ids of a text with one marker for each of these images, with all their placeholders."""
        if not self._has_grid:
            images = [open_image(content) for content in contents]
            [ids] = self._processor(text=[text], images=[images], add_special_tokens=False)["input_ids"]
            return list(ids)
        counts = iter(map(self.count, contents))
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [each for token in ids for each in ([token] * (next(counts) if token == self.token_id else 1))]

    def inputs(self, network: PreTrainedModel, packed: MicroBatch) -> dict[str, Tensor]:
        """The arguments of the model's forward for a micro-batch with images, instead of ids and positions alone."""
        device = packed.token_ids_T.device
        dtype = network.get_input_embeddings().weight.dtype
        inputs = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None)
            for name, tensor in self._pixels(packed.images).items()
        }
        return {
            "input_ids": self._without_sampled(packed).unsqueeze(0),
            "position_ids": self._positions(network, packed),
            **inputs,
        }

    def _pixels(self, contents: Sequence[bytes]) -> dict[str, Tensor]:
        """The processor's tensors. Those of Qwen's families are rows of patches, image after image; others may be padded to
        the largest image.
        """
        if not self._has_grid:
            return self._prepare(contents)
        parts = [self._prepare([content]) for content in contents]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _prepare(self, contents: Sequence[bytes]) -> dict[str, Tensor]:
        """The tensors of these images together, for arguments of the model's forward."""
        key = b"".join(map(_digest, contents))
        if (tensors := self._prepared.get(key)) is None:
            prepare = self._processor if self._has_grid else self._processor.image_processor
            found = prepare(images=[open_image(content) for content in contents], return_tensors="pt")
            tensors = {
                name: tensor for name, tensor in found.items() if name in self._accepted and isinstance(tensor, Tensor)
            }
            self._prepared.add(key, tensors)
        return tensors

    def _without_sampled(self, packed: MicroBatch) -> Tensor:
        """The ids, with another token in place of a placeholder that was sampled: it is the last of its segment, so
        nothing depends on it.
        """
        is_image_T = torch.zeros_like(packed.token_ids_T, dtype=torch.bool)
        is_image_T[torch.tensor(packed.image_rows, device=is_image_T.device)] = True
        other = 0 if self.token_id else 1
        return packed.token_ids_T.masked_fill((packed.token_ids_T == self.token_id) & ~is_image_T, other)

    def _positions(self, network: PreTrainedModel, packed: MicroBatch) -> Tensor:
        """[1, T], or [3, 1, T] where places in an image have a height and a width."""
        rope_index: Any = getattr(network.base_model, "get_rope_index", None)
        if rope_index is None:
            return packed.positions_T.unsqueeze(0)
        positions_3T = packed.positions_T.cpu().repeat(3, 1)
        for segment, rows_T in zip(packed.segments, packed.layout.rows, strict=True):
            if not segment.images:
                continue
            ids_1T = torch.tensor([segment.token_ids])
            types_1T = torch.zeros_like(ids_1T)
            for image in segment.images:
                types_1T[0, list(image.places)] = 1
            grids = [size.grid for image in segment.images if (size := self._size(image.content)).grid is not None]
            found_31T, _ = rope_index(ids_1T, mm_token_type_ids=types_1T, image_grid_thw=torch.cat(grids))
            positions_3T[:, rows_T] = found_31T[:, 0]
        return positions_3T.to(packed.token_ids_T.device).unsqueeze(1)


class _PreparedImages:
    """The tensors of the images that were used last, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._tensors: OrderedDict[bytes, dict[str, Tensor]] = OrderedDict()

    def get(self, key: bytes) -> dict[str, Tensor] | None:
        if key in self._tensors:
            self._tensors.move_to_end(key)
        return self._tensors.get(key)

    def add(self, key: bytes, tensors: dict[str, Tensor]) -> None:
        """Add tensors that are not there, and drop those that were not used for longest."""
        self._tensors[key] = tensors
        self._bytes += _bytes_of(tensors)
        while self._bytes > self._most_bytes and self._tensors:
            _, dropped = self._tensors.popitem(last=False)
            self._bytes -= _bytes_of(dropped)


def _bytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def open_image(content: bytes) -> Image:
    """The image of a file as vLLM opens it: upright, in RGB, transparent on white.

    A damaged file that vLLM reads is read here, too, with the same pixels: the model has seen them.

    Raises:
        ValueError: it cannot be read.
    """
    from PIL import ImageOps

    image: Image = _identify(content)
    with suppress(Exception):  # as in vLLM; also a damaged file, of which the next line reads what is there
        image = ImageOps.exif_transpose(image)
    try:
        image.load()
        return _on_white(image)
    except Exception as error:  # noqa: BLE001  (each format of Pillow has its own)
        raise _unreadable(content, error) from None


def _identify(content: bytes) -> Image:
    """The image of a file, of which only the header was read. Raises ValueError as `open_image`."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(content), formats=FORMATS)
    except Exception as error:  # noqa: BLE001  (as above)
        raise _unreadable(content, error) from None


def _unreadable(content: bytes, error: Exception) -> ValueError:
    named = str(error).replace(" <_io.BytesIO object", "").partition(" at 0x")[0] or type(error).__name__
    return ValueError(f"an image of {len(content):,} bytes cannot be read: {named}")


def _on_white(image: Image) -> Image:
    from PIL import Image

    if image.mode != "RGB" and (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def _load_processor(path: str, *, images_only: bool) -> Any:
    """The processor of a checkpoint. images_only: not that of its videos, which needs torchvision."""
    from transformers import AutoImageProcessor, AutoProcessor

    try:
        kind = AutoImageProcessor if images_only else AutoProcessor
        return kind.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise UnusableImages(f"the image processor of {path} cannot be loaded: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    """The first line of an error that has text, up to 300 characters."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


@contextmanager
def share_decoder(network: PreTrainedModel, group: SequenceParallelGroup | None) -> Iterator[None]:
    """Within this block the decoder computes this rank's share of the tokens. Each rank of the group computes the vectors
    of all images; the gradient of the encoder, if it is trained, is that of this rank's share, as that of the decoder.
    """
    if group is None:
        yield
        return

    def shard(_: nn.Module, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, keywords | _shard_inputs(keywords, group)

    handle = network.get_decoder().register_forward_pre_hook(shard, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _shard_inputs(inputs: dict[str, Any], group: SequenceParallelGroup) -> dict[str, Any]:
    """This rank's share of the arguments of a decoder that have an axis T.

    deepstack_visual_embeds: of Qwen3-VL, [V, H] for the first layers, where V are the places of visual_pos_masks.
    """
    embeds_TH = inputs["inputs_embeds"][0]
    shares = {"inputs_embeds": group.shard(embeds_TH).unsqueeze(0)}
    places = inputs["position_ids"]  # [1, T] or [3, 1, T]
    shares["position_ids"] = group.shard(places.movedim(-1, 0)).movedim(0, -1)
    is_image = inputs.get("visual_pos_masks")
    if is_image is None:
        return shares
    own_T = group.shard(is_image[0])
    before = int(is_image[0, : group.first(len(embeds_TH))].sum())
    rows = slice(before, before + int(own_T.sum()))
    deepstack = [embeds_VH[rows] for embeds_VH in inputs["deepstack_visual_embeds"]]
    return {**shares, "visual_pos_masks": own_T.unsqueeze(0), "deepstack_visual_embeds": deepstack}


def placeholder_problem(teacher: ImageReader, policy: ImageReader) -> str | None:
    """The reason why a teacher cannot read the images in the policy's token ids, or None. Sizes are samples."""
    if teacher.token_id != policy.token_id:
        return f"the token of its images has the id {teacher.token_id}, the policy's {policy.token_id}"
    for width, height in COMPARED_SIZES:
        content = _picture(width, height)
        counts = teacher.count(content), policy.count(content)
        if counts[0] != counts[1]:
            return f"an image of {width}x{height} has {counts[0]} placeholders there, and {counts[1]} with the policy"
    return None


def has_vision(network: PreTrainedModel) -> bool:
    """Whether the network has an encoder of images."""
    return hasattr(network.config, "vision_config")


def copy_processor(network: PreTrainedModel, folder: Path) -> None:
    """Copy the files of the checkpoint's processor, which a server needs next to the weights of a model with images."""
    from transformers.utils.hub import cached_file

    for name in PROCESSOR_FILES if has_vision(network) else ():
        file = cached_file(network.name_or_path, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            shutil.copyfile(file, folder / name)


def freeze_vision(network: PreTrainedModel) -> None:
    """Exclude everything from training but the decoder and the head."""
    for parameter in _vision_parameters(network).values():
        parameter.requires_grad_(False)


def unfreeze_vision(network: PreTrainedModel, reader: ImageReader) -> list[str]:
    """Train the encoder and its projection, too. Returns the names of those of their parameters on which no vector of an
    image depends, which stay frozen: in LLaVA's families, what comes after the layer whose outputs are used.
    """
    parameters = _vision_parameters(network)
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    packed = pack([reader.example], network.device)
    inputs = reader.inputs(network, packed)
    hidden_TH = network.base_model(**inputs, use_cache=False, layout=packed.layout).last_hidden_state[0]
    gradients = torch.autograd.grad(hidden_TH.sum(), list(parameters.values()), allow_unused=True)
    unused = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]
    for name in unused:
        parameters[name].requires_grad_(False)
    return unused


def _vision_parameters(network: PreTrainedModel) -> dict[str, nn.Parameter]:
    """All parameters but those of the decoder and the head, by name."""
    others = {id(parameter) for parameter in network.get_decoder().parameters()}
    others |= {id(parameter) for parameter in network.get_output_embeddings().parameters()}
    return {name: parameter for name, parameter in network.named_parameters() if id(parameter) not in others}


@torch.no_grad()
def _reads_images_as_text(network: PreTrainedModel, reader: ImageReader) -> bool:
    """Whether the hidden states of the first layers, around two images, are those of the model's own attention."""
    packed = pack([reader.example], network.device)
    base, decoder = network.base_model, network.get_decoder()
    kept = getattr(decoder, "layers", None)
    if isinstance(kept, nn.ModuleList):
        decoder.layers = kept[:PROBE_LAYERS]
    try:
        inputs = reader.inputs(network, packed)
        ours_TH = base(**inputs, use_cache=False, layout=packed.layout).last_hidden_state[0]
        types = torch.zeros_like(packed.token_ids_T)
        types[list(packed.image_rows)] = 1
        decoder.set_attn_implementation("eager")
        names = ("mm_token_type_ids", "token_type_ids")
        inputs |= {name: types.unsqueeze(0) for name in names if name in reader._accepted}
        del inputs["position_ids"]  # the model computes its own
        expected_TH = base(**inputs, use_cache=False).last_hidden_state[0]
    finally:
        decoder.set_attn_implementation(attention.NAME)
        if isinstance(kept, nn.ModuleList):
            decoder.layers = kept
    return torch.allclose(ours_TH, expected_TH, rtol=1e-3, atol=1e-3 * float(expected_TH.abs().max()))


def _example(reader: ImageReader) -> Sample:
    """A sequence with text around two images of different sizes."""
    contents = [_picture(64, 96), _picture(128, 64)]
    other = 1 if reader.token_id != 1 else 2
    ids, images = [other] * 3, list[PlacedImage]()
    for content in contents:
        places = range(len(ids), len(ids) + reader.count(content))
        images.append(PlacedImage.at(content, places))
        ids += [reader.token_id] * len(places) + [other] * 2
    return Sample((Segment(ids, [], tuple(images)),))


def _picture(width: int, height: int) -> bytes:
    """A PNG file with a gradient."""
    from PIL import Image

    out = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(out, "PNG")
    return out.getvalue()
