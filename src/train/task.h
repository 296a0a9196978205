#pragma once

#include "semitone/zoo/image_set.h"
#include "semitone/zoo/text.h"
#include "src/train/classifier.h"
#include "src/train/data_set.h"
#include "src/train/models.h"
#include "src/train/text.h"

#include <string>

namespace semitone::train {

// What is trained: a model, and the data from which it learns.
struct Task {
  ModelFactory make_model;
  DataSet data;
  // "60000 training and 10000 test images of 1 x 28 x 28 in 10 classes"
  std::string description;
};

// To classify images. Error as image_data's, for a model of texts, and from make_model for images
// that do not fit.
Task image_task(const ModelChoice& model, const zoo::ImageSet& train, const zoo::ImageSet& test);

// To predict the characters of a text. Error as text_data's, and for a model of images.
Task text_task(const ModelChoice& model, const zoo::Text& text, const TextOptions& options = {});

}  // namespace semitone::train
