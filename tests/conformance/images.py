#!/usr/bin/env python3
"""Writes data/images.json: image files, and the colours that PIL reads from them.

images.py JSON

PNG files of every colour type and depth are written here, since PIL writes few of them. Files and colours (rows of
pixels of three bytes) are in hexadecimal. Where PIL cuts 16-bit greys off at 255, their upper bytes take the place of
its colours.
"""

import io
import json
import random
import struct
import sys
import zlib

import PIL
from PIL import Image, features

# Adam7: the first row and column of each pass, and the steps.
PASSES = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
CHANNELS = {"grey": 1, "rgb": 3, "palette": 1, "grey_alpha": 2, "rgba": 4}
COLOUR_TYPES = {"grey": 0, "rgb": 2, "palette": 3, "grey_alpha": 4, "rgba": 6}
DEPTHS = {"grey": [1, 2, 4, 8, 16], "rgb": [8, 16], "palette": [1, 2, 4, 8], "grey_alpha": [8, 16], "rgba": [8, 16]}

rng = random.Random(0)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def packed(samples: list[int], depth: int) -> bytes:
    bits = "".join(format(sample, f"0{depth}b") for sample in samples)
    return bytes(int(bits[i:i + 8].ljust(8, "0"), 2) for i in range(0, len(bits), 8))


def predicted(kind: int, left: int, above: int, corner: int) -> int:
    if kind == 4:
        estimate = left + above - corner
        return min([left, above, corner], key=lambda value: abs(estimate - value))
    return [0, left, above, (left + above) // 2][kind]


def filtered(rows: list[bytes], step: int) -> bytes:
    """The rows, each with the next of the five filters."""
    result, above = b"", bytes(len(rows[0]))
    for y, row in enumerate(rows):
        kind = (y + 4) % 5
        result += bytes([kind])
        for i, byte in enumerate(row):
            left, corner = (row[i - step], above[i - step]) if i >= step else (0, 0)
            result += bytes([(byte - predicted(kind, left, above[i], corner)) % 256])
        above = row
    return result


def png(kind: str, depth: int, height: int, width: int, interlaced: bool, before: bytes = b"", palette: int = 0,
        pieces: int = 1, more: bytes = b"") -> tuple[bytes, list[list[list[int]]]]:
    """A PNG with random samples, and these."""
    pixels = [[[rng.randrange(2 ** depth) for _ in range(CHANNELS[kind])] for _ in range(width)] for _ in range(height)]
    step = max(1, CHANNELS[kind] * depth // 8)
    data = b""
    for top, left, down, right in PASSES if interlaced else [(0, 0, 1, 1)]:
        rows = [[sample for pixel in row[left::right] for sample in pixel] for row in pixels[top::down]]
        if rows and rows[0]:
            data += filtered([packed(row, depth) for row in rows], step)
    head = struct.pack(">IIBBBBB", width, height, depth, COLOUR_TYPES[kind], 0, 0, interlaced)
    if kind == "palette":
        before += chunk(b"PLTE", rng.randbytes(3 * (palette or 2 ** depth)))
    data = zlib.compress(data, 9) + more
    size = -(-len(data) // pieces)
    middle = b"".join(chunk(b"IDAT", data[i:i + size]) for i in range(0, len(data), size))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + before + middle + chunk(b"IEND", b""), pixels


def gradient(height: int, width: int, mode: str) -> Image.Image:
    """Smooth colours with an edge, so that chroma matters."""
    image = Image.new(mode, (width, height))
    for y in range(height):
        for x in range(width):
            values = (20 * y % 256, 255 - 12 * x % 256, 90 if 2 * x < width else 200, 40 + 9 * y)
            image.putpixel((x, y), values[:len(image.getbands())] if len(image.getbands()) > 1 else values[1])
    return image


def jpeg(mode: str, height: int = 11, width: int = 19, **options) -> bytes:
    file = io.BytesIO()
    gradient(height, width, mode).save(file, "jpeg", **{"quality": 88, "optimize": True, **options})
    return file.getvalue()


def without(content: bytes, kind: int) -> bytes:
    """The JPEG without its segments of a kind."""
    at = content.index(bytes([0xFF, kind]))
    return content[:at] + content[at + 2 + struct.unpack(">H", content[at + 2:at + 4])[0]:]


def read(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def is_refused(content: bytes) -> bool:
    try:
        read(content)
    except (OSError, SyntaxError):
        return True
    return False


def main() -> None:
    files = {}
    for kind, depths in DEPTHS.items():
        for depth in depths:
            for interlaced in [False, True]:
                files[f"{kind}_{depth}{'_interlaced' if interlaced else ''}"] = png(kind, depth, 6, 9, interlaced)
    files["png_of_one_pixel_interlaced"] = png("rgb", 8, 1, 1, True)
    files["png_of_one_column_interlaced"] = png("grey", 2, 9, 1, True)
    files["png_with_transparent_grey"] = png("grey", 4, 3, 5, False, chunk(b"tRNS", b"\0\3"))
    files["png_with_transparent_rgb_16"] = png("rgb", 16, 3, 5, True, chunk(b"tRNS", b"\0\3\0\4\0\5"))
    files["png_with_a_short_palette"] = png("palette", 4, 3, 5, False, palette=7)
    files["png_with_gamma"] = png("rgb", 8, 3, 5, False, chunk(b"gAMA", struct.pack(">I", 100000)))
    files["png_with_srgb_and_text"] = png("rgb", 16, 3, 5, False, chunk(b"sRGB", b"\0") + chunk(b"tEXt", b"a\0b"))
    files["png_with_a_damaged_profile"] = png("rgb", 8, 3, 5, False, chunk(b"iCCP", b"p\0\0" + zlib.compress(b"no profile")))
    files["png_in_pieces"] = png("rgb", 8, 3, 5, False, pieces=9)
    files["png_with_more_data"] = png("rgb", 8, 3, 5, False, more=b"more")
    for name, (content, pixels) in files.items():
        if name.startswith("grey_16"):
            colours = bytes(sample >> 8 for row in pixels for pixel in row for sample in 3 * pixel)
            files[name] = (content, colours)
        else:
            files[name] = (content, read(content).tobytes())

    orientation = Image.Exif()
    orientation[0x0112] = 6
    jpegs = {
        "jpeg": jpeg("RGB"),
        "jpeg_444": jpeg("RGB", subsampling=0),
        "jpeg_422": jpeg("RGB", subsampling=1),
        "jpeg_progressive": jpeg("RGB", progressive=True),
        "jpeg_grey": jpeg("L"),
        "jpeg_grey_progressive": jpeg("L", progressive=True),
        "jpeg_with_restarts": jpeg("RGB", restart_marker_blocks=1),
        "jpeg_of_rgb": jpeg("RGB", keep_rgb=True),
        "jpeg_turned": jpeg("RGB", exif=orientation),
        "jpeg_of_one_pixel": jpeg("RGB", 1, 1),
        "jpeg_cmyk": jpeg("CMYK"),
        "jpeg_cmyk_progressive": jpeg("CMYK", progressive=True),
        "jpeg_cmyk_without_adobe": without(jpeg("CMYK"), 0xEE),
    }
    # Adobe's marker with the transformation 2: YCCK.
    jpegs["jpeg_ycck"] = jpegs["jpeg_cmyk"].replace(b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0", b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\2")
    assert jpegs["jpeg_ycck"] != jpegs["jpeg_cmyk"]
    for name, content in jpegs.items():
        # Without the two bytes of its end, it depends on the image whether PIL refuses it.
        assert all(is_refused(content[:size]) for size in range(len(content) - 2)), name
    whole = jpegs["jpeg"]
    jpegs["jpeg_with_more_data"] = whole + b"more"
    jpegs["jpeg_with_bytes_before_the_end"] = whole[:-2] + b"\0\0\0" + whole[-2:]
    for name, content in jpegs.items():
        files[name] = (content, read(content).tobytes())

    entries = []
    for name, (content, colours) in files.items():
        width, height = Image.open(io.BytesIO(content)).size
        entries.append(f'  {{"name": "{name}", "height": {height}, "width": {width}, "file": "{content.hex()}",'
                       f' "colours": "{colours.hex()}"}}')
    peer = f"Pillow {PIL.__version__} with libjpeg-turbo {features.version('libjpeg_turbo')}"
    with open(sys.argv[1], "w") as file:
        file.write(f'{{\n "schema": "images/1",\n "peer": "{peer}",\n "images": [\n' + ",\n".join(entries) + "\n ]\n}\n")
    json.load(open(sys.argv[1]))


if __name__ == "__main__":
    main()
