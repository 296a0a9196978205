#pragma once

#include "src/report/histogram.h"

#include <cstdint>
#include <string>
#include <string_view>

// The records of TensorBoard's files: messages of the type Event (tensorboard/compat/proto/
// event.proto), in the frames of TensorFlow's TFRecord files.
namespace semitone::report {

// When something happened: seconds since 1970, and the step of the training.
struct Moment {
  double time;
  std::int64_t step;
  bool is_exact = true;  // false: in one of the steps up to this one
};

// Returns a name for a new file, which is unique in this process and unlikely to exist elsewhere.
std::string events_file_name(double time);

// The first record of a file.
std::string file_version_record(double time);
// Makes TensorBoard drop what the files before, and this one so far, have from this step on.
std::string restart_record(const Moment& when);

std::string scalar_record(const Moment& when, std::string_view name, double value);
std::string text_record(const Moment& when, std::string_view name, std::string_view text);
std::string histogram_record(const Moment& when, std::string_view name, const Histogram& values);

}  // namespace semitone::report
