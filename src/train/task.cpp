#include "src/train/task.h"

#include "semitone/core/error.h"
#include "src/train/images.h"

#include <fmt/format.h>

#include <string>
#include <utility>

namespace semitone::train {
namespace {

void require_kind(const ModelChoice& model, const DataKind& kind) {
  if (model.kind() != kind) {
    throw Error("train.task", fmt::format("a model for {}", kind.name),
                fmt::format("{}, a model for {}", model.name, model.kind().name));
  }
}

}  // namespace

Task image_task(const ModelChoice& model, const zoo::ImageSet& train, const zoo::ImageSet& test) {
  require_kind(model, kImages);
  DataSet data = image_data(train, test);
  const ImageShape shape = shape_of(train);
  return {[make = model.make_for_images, shape] { return make(shape); }, std::move(data),
          fmt::format("{} training and {} test images of {} x {} x {} in {} classes", train.size(),
                      test.size(), shape.channels, shape.height, shape.width, shape.classes)};
}

Task text_task(const ModelChoice& model, const zoo::Text& text, const TextOptions& options) {
  require_kind(model, kText);
  DataSet data = text_data(text, options);
  const auto characters = [&](const Examples& part) {
    return part.size() * options.sequence_length();
  };
  const std::string description = fmt::format(
      "{} training and {} test characters, {} different ones, in sequences of {}",
      characters(*data.train), characters(*data.test), text.classes(), options.sequence_length());
  return {[make = model.make_for_text, classes = text.classes()] { return make(classes); },
          std::move(data), description};
}

}  // namespace semitone::train
