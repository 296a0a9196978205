#include "src/train/images.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/zoo/augment.h"

#include <c10/util/StringUtil.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <utility>

namespace semitone::train {
namespace {

constexpr auto kImageData = "train.images";

class ImageExamples final : public Examples {
 public:
  explicit ImageExamples(zoo::ImageSet set) : set_(std::move(set)) {}

  std::int64_t size() const override { return set_.size(); }

  std::shared_ptr<const Examples> to(c10::Device device) const override {
    zoo::ImageSet moved = set_;
    moved.images = set_.images.to(device);
    moved.labels = set_.labels.to(device);
    return std::make_shared<ImageExamples>(std::move(moved));
  }

  Batch batch(const at::Tensor& indices) const override {
    return batch_of(set_.images.index_select(0, indices), indices);
  }

  Batch augmented(const at::Tensor& indices, std::uint64_t seed,
                  std::int64_t epoch) const override {
    return batch_of(zoo::augment(set_.images.index_select(0, indices), indices, epoch,
                                 zoo::AugmentOptions().seed(seed)),
                    indices);
  }

 private:
  Batch batch_of(const at::Tensor& bytes, const at::Tensor& indices) const {
    at::Tensor images = bytes.to(torch::kFloat).div_(255);
    if (images.dim() == 3) images = images.unsqueeze(1);
    return {images, set_.labels.index_select(0, indices)};
  }

  zoo::ImageSet set_;
};

// @param name  "training", for the message
void check_set(const zoo::ImageSet& set, const char* name) {
  const bool has_images = set.images.defined() &&
                          (set.images.dim() == 3 || set.images.dim() == 4) &&
                          set.images.scalar_type() == torch::kByte && set.images.numel() > 0;
  if (!has_images) {
    throw Error(
        kImageData,
        std::string("uint8 images (N, height, width) or (N, channels, height, width) in the ") +
            name + " set",
        set.images.defined()
            ? c10::str(dtype_name(set.images.scalar_type()), " of sizes ", set.images.sizes())
            : "none");
  }
  if (!set.labels.defined() || set.labels.scalar_type() != torch::kLong || set.labels.dim() != 1 ||
      set.labels.size(0) != set.size()) {
    throw Error(kImageData, std::to_string(set.size()) + " int64 labels in the " + name + " set",
                set.labels.defined() ? c10::str(dtype_name(set.labels.scalar_type()), " of sizes ",
                                                set.labels.sizes())
                                     : "none");
  }
}

}  // namespace

DataSet image_data(const zoo::ImageSet& train, const zoo::ImageSet& test) {
  check_set(train, "training");
  check_set(test, "test");
  const auto size = [](const zoo::ImageSet& set) { return set.images.sizes().slice(1); };
  if (size(train) != size(test)) {
    throw Error(kImageData, c10::str("test images of sizes ", size(train), ", as for training"),
                c10::str(size(test)), "scale both with --image-size N");
  }
  return {std::make_shared<ImageExamples>(train),
          std::make_shared<ImageExamples>(test),
          kImages,
          {},
          [train] { return checksum_of({train.images, train.labels}); }};
}

}  // namespace semitone::train
