#pragma once

#include "semitone/zoo/mnist.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>

// Synthetic images, and data sets in the formats of MNIST and CIFAR-10.
namespace semitone::test {

// Ten classes that a small network distinguishes after some ten steps: a bright square whose place
// depends on the class, shifted by up to two pixels, in noise.
zoo::ImageSet made_up_images(std::int64_t count, std::uint64_t seed);

// Ten classes of 3 x 32 x 32 images, which differ in colour and in the place of a square.
zoo::ImageSet made_up_colours(std::int64_t count, std::uint64_t seed);

// A uint8 tensor as the bytes of an IDX file.
std::string idx_bytes(const at::Tensor& data);

// Compressed by gzip, or as a zlib stream.
std::string gzip(const std::string& bytes);
std::string zlib(const std::string& bytes);

// A colour image, uint8 (3, height, width), as the bytes of a PPM file or of a PNG.
std::string ppm_bytes(const at::Tensor& image);
std::string png_bytes(const at::Tensor& image);
// A chunk of a PNG, with its checksum.
std::string png_chunk(const std::string& type, const std::string& content);

// Writes the four files of a data set of synthetic images, the training half gzipped.
void write_data_set(const std::filesystem::path& folder, std::int64_t train, std::int64_t test);

// Colour images and their labels as the bytes of a file of CIFAR-10.
std::string cifar_bytes(const zoo::ImageSet& set);

// Writes the six files of CIFAR-10. The number of training images is a multiple of five.
void write_cifar10(const std::filesystem::path& folder, std::int64_t train, std::int64_t test);

}  // namespace semitone::test
