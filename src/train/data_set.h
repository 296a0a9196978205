#pragma once

#include "semitone/zoo/mnist.h"

namespace semitone::train {

struct DataSet {
  zoo::ImageSet train;
  zoo::ImageSet test;
};

}  // namespace semitone::train
