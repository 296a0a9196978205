#include "semitone/zoo/augment.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/splitmix64.h"

#include <torch/types.h>

#include <string>

namespace semitone::zoo {
namespace {

constexpr auto kAugment = "zoo.augment";

std::int64_t i64(std::uint64_t bits) {
  return static_cast<std::int64_t>(bits);
}

at::Tensor logical_right_shift(const at::Tensor& values, int bits) {
  return values.bitwise_right_shift(bits).bitwise_and(i64(~std::uint64_t{0} >> bits));
}

// Element by element; int64 products wrap as uint64's do.
at::Tensor splitmix64(const at::Tensor& numbers) {
  at::Tensor values = numbers + i64(0x9E3779B97F4A7C15U);
  values = values.bitwise_xor(logical_right_shift(values, 30)) * i64(0xBF58476D1CE4E5B9U);
  values = values.bitwise_xor(logical_right_shift(values, 27)) * i64(0x94D049BB133111EBU);
  return values.bitwise_xor(logical_right_shift(values, 31));
}

void check(const at::Tensor& images, const at::Tensor& indices, std::int64_t epoch,
           const AugmentOptions& options) {
  const auto require = [](bool good, const char* expected, const std::string& got) {
    if (!good) throw Error(kAugment, expected, got);
  };
  const auto described = [](const at::Tensor& tensor) {
    return tensor.defined()
               ? c10::str(dtype_name(tensor.scalar_type()), " of sizes ", tensor.sizes())
               : std::string("none");
  };
  require(images.defined() && (images.dim() == 3 || images.dim() == 4),
          "images (B, height, width) or (B, channels, height, width)", described(images));
  require(indices.defined() && indices.scalar_type() == torch::kLong && indices.dim() == 1 &&
              indices.size(0) == images.size(0),
          "an int64 index for each image", described(indices));
  require(indices.device() == images.device(), "indices on the device of the images",
          c10::str(indices.device(), " and ", images.device()));
  require(epoch >= 0, "an epoch of 0 or more", std::to_string(epoch));
  require(options.padding() >= 0, "a padding of 0 or more", std::to_string(options.padding()));
  require(options.flip_probability() >= 0 && options.flip_probability() <= 1,
          "a flip_probability from 0 to 1", std::to_string(options.flip_probability()));
}

}  // namespace

at::Tensor augment(const at::Tensor& images, const at::Tensor& indices, std::int64_t epoch,
                   const AugmentOptions& options) {
  check(images, indices, epoch, options);
  const std::int64_t padding = options.padding();
  const std::int64_t height = images.size(-2);
  const std::int64_t width = images.size(-1);
  const std::uint64_t key = semitone::splitmix64(semitone::splitmix64(options.seed()) +
                                                 static_cast<std::uint64_t>(epoch));
  const at::Tensor keys = splitmix64(indices + i64(key));
  // Numbers from 0 to 2^31 - 1.
  const auto draw = [&](int number) { return logical_right_shift(splitmix64(keys + number), 33); };
  const auto positions = [&](std::int64_t size) {
    return torch::arange(size, indices.options()).unsqueeze(0);
  };
  const std::int64_t offsets = 2 * padding + 1;
  const at::Tensor rows = positions(height) + draw(0).remainder(offsets).unsqueeze(1);
  const auto limit = static_cast<std::int64_t>(options.flip_probability() * 0x1p31);
  const at::Tensor is_flipped = draw(2).lt(limit).unsqueeze(1);
  const at::Tensor columns =
      torch::where(is_flipped, width - 1 - positions(width), positions(width)) +
      draw(1).remainder(offsets).unsqueeze(1);

  const at::Tensor framed =
      at::constant_pad_nd(images, {padding, padding, padding, padding}).flatten(-2);
  const at::Tensor places =
      (rows.unsqueeze(2) * (width + 2 * padding) + columns.unsqueeze(1)).flatten(1);
  if (images.dim() == 3) return framed.gather(1, places).view(images.sizes());
  return framed.gather(2, places.unsqueeze(1).expand({-1, images.size(1), -1}))
      .view(images.sizes());
}

}  // namespace semitone::zoo
