#include "src/train/task.h"

#include "src/train/images.h"

#include <fmt/format.h>

#include <utility>

namespace semitone::train {

Task image_task(const ModelChoice& model, const zoo::ImageSet& train, const zoo::ImageSet& test) {
  DataSet data = image_data(train, test);
  const ImageShape shape = shape_of(train);
  return {[make = model.make, shape] { return make(shape); }, std::move(data),
          fmt::format("{} training and {} test images of {} x {} x {} in {} classes", train.size(),
                      test.size(), shape.channels, shape.height, shape.width, shape.classes)};
}

}  // namespace semitone::train
