#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

// What elastic_program and elastic_test have in common: the sizes of the training, and the files in
// its folder.
namespace semitone::test::elastic {

inline constexpr std::size_t kImages = 120;
inline constexpr std::size_t kBatch = 4;  // images per step, of all ranks together
inline constexpr std::int64_t kStepsPerEpoch = kImages / kBatch;
inline constexpr std::int64_t kSteps = 2 * kStepsPerEpoch;
inline constexpr std::int64_t kSaveEvery = 3;  // steps
static_assert(kImages % kBatch == 0, "otherwise the samplers repeat images at the end of an epoch");

// The test writes a number of steps to this file. The ranks take no more steps than that. Rank 0 of
// several begins one more, in which it waits for the others.
inline constexpr auto kAllowed = "allowed";
// Rank 0 writes the weights at the end.
inline constexpr auto kWeights = "weights.pt";

// Each rank of each attempt writes one line: the world size, the step from which it goes on, and
// its process number.
inline std::string started_file(int attempt, int rank) {
  return "started." + std::to_string(attempt) + "." + std::to_string(rank);
}

// Each rank of each attempt writes a line for each step before it trains: the step, and the images.
inline std::string images_file(int attempt, int rank) {
  return "images." + std::to_string(attempt) + "." + std::to_string(rank);
}

}  // namespace semitone::test::elastic
