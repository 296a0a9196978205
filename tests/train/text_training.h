#pragma once

#include "semitone/zoo/decoder.h"
#include "src/train/text.h"
#include "src/train/trainer.h"
#include "tests/support/made_up_text.h"

// Small trainings on a synthetic text.
namespace semitone::train {

inline zoo::Decoder small_decoder(std::int64_t characters) {
  return zoo::Decoder(
      zoo::DecoderOptions().layers(2).width(64).heads(4).ffn(128).vocabulary(characters));
}

inline Classifier small_gpt() {
  return small_decoder(test::read_made_up_text(1, 1).classes());
}

// 135 training and 14 test sequences.
inline DataSet short_text() {
  return text_data(test::read_made_up_text(800, 2), TextOptions().sequence_length(32));
}

inline TrainOptions text_options(amp::OptLevel level, c10::ScalarType dtype) {
  return TrainOptions().opt_level(level).dtype(dtype).batch_size(8).optimizer("adamw").lr(0.005);
}

}  // namespace semitone::train
