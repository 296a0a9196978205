#include "tests/support/image_files.h"

#include "tests/support/temporary_folder.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>

#include <zlib.h>

#include <stdexcept>
#include <string>

namespace semitone::test {

zoo::ImageSet made_up_images(std::int64_t count, std::uint64_t seed) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  const at::Tensor labels = torch::randint(0, 10, {count}, generator, torch::kLong);
  const at::Tensor shifts = torch::randint(0, 3, {count, 2}, generator, torch::kLong);
  at::Tensor images = torch::randint(0, 60, {count, 28, 28}, generator, torch::kByte);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto label = labels[i].item<std::int64_t>();
    const std::int64_t top = 1 + 8 * (label / 4) + shifts[i][0].item<std::int64_t>();
    const std::int64_t left = 1 + 6 * (label % 4) + shifts[i][1].item<std::int64_t>();
    images[i].narrow(0, top, 6).narrow(1, left, 5).fill_(220);
  }
  return {images, labels, 10};
}

zoo::ImageSet made_up_colours(std::int64_t count, std::uint64_t seed) {
  const zoo::ImageSet grey = made_up_images(count, seed);
  const at::Tensor framed = torch::constant_pad_nd(grey.images, {2, 2, 2, 2}, 30);
  at::Tensor images = torch::stack({framed, framed, framed}, 1);
  // The channel label % 3 is as it was, and the other two are darker.
  for (std::int64_t channel = 0; channel < 3; ++channel) {
    const at::Tensor others = grey.labels.remainder(3).ne(channel).view({-1, 1, 1});
    images.select(1, channel).copy_(torch::where(others, framed.div(2, "floor"), framed));
  }
  return {images, grey.labels, 10};
}

std::string idx_bytes(const at::Tensor& data) {
  std::string bytes{'\0', '\0', '\x08', static_cast<char>(data.dim())};
  for (const std::int64_t size : data.sizes()) {
    for (const int shift : {24, 16, 8, 0}) bytes.push_back(static_cast<char>(size >> shift));
  }
  const at::Tensor flat = data.contiguous();
  return bytes.append(static_cast<const char*>(flat.const_data_ptr()), flat.nbytes());
}

namespace {

std::string deflated(const std::string& bytes, int window) {
  z_stream stream{};
  if (deflateInit2(&stream, 6, Z_DEFLATED, window, 8, Z_DEFAULT_STRATEGY) != Z_OK)
    throw std::runtime_error("deflateInit2");
  std::string packed(deflateBound(&stream, bytes.size()), '\0');
  std::string input = bytes;
  stream.next_in = reinterpret_cast<Bytef*>(input.data());
  stream.avail_in = static_cast<uInt>(input.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  const int result = deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  if (result != Z_STREAM_END) throw std::runtime_error("deflate");
  return packed;
}

std::string big_endian(std::uint64_t value) {
  std::string bytes;
  for (const int shift : {24, 16, 8, 0}) bytes.push_back(static_cast<char>(value >> shift));
  return bytes;
}

}  // namespace

std::string gzip(const std::string& bytes) {
  return deflated(bytes, 15 + 16);
}

std::string zlib(const std::string& bytes) {
  return deflated(bytes, 15);
}

std::string ppm_bytes(const at::Tensor& image) {
  const at::Tensor pixels = image.permute({1, 2, 0}).contiguous();
  return "P6\n" + std::to_string(image.size(2)) + " " + std::to_string(image.size(1)) + "\n255\n" +
         std::string(static_cast<const char*>(pixels.const_data_ptr()), pixels.nbytes());
}

std::string png_chunk(const std::string& type, const std::string& content) {
  const std::string summed = type + content;
  const auto sum =
      crc32(0, reinterpret_cast<const Bytef*>(summed.data()), static_cast<uInt>(summed.size()));
  return big_endian(content.size()) + summed + big_endian(sum);
}

std::string png_bytes(const at::Tensor& image) {
  const at::Tensor pixels = image.permute({1, 2, 0}).contiguous();
  const auto size = static_cast<std::size_t>(3 * image.size(2));
  std::string rows;
  for (std::int64_t y = 0; y < image.size(1); ++y) {
    rows.push_back('\0');  // no filter
    rows.append(static_cast<const char*>(pixels[y].const_data_ptr()), size);
  }
  const std::string header = big_endian(static_cast<std::uint64_t>(image.size(2))) +
                             big_endian(static_cast<std::uint64_t>(image.size(1))) +
                             std::string("\x08\x02\0\0\0", 5);
  return "\x89PNG\r\n\x1a\n" + png_chunk("IHDR", header) + png_chunk("IDAT", zlib(rows)) +
         png_chunk("IEND", "");
}

void write_data_set(const std::filesystem::path& folder, std::int64_t train, std::int64_t test) {
  const zoo::ImageSet training = made_up_images(train, 1);
  const zoo::ImageSet testing = made_up_images(test, 2);
  const auto bytes_of = [](const at::Tensor& labels) { return idx_bytes(labels.to(torch::kByte)); };
  write_text(folder / "train-images-idx3-ubyte.gz", gzip(idx_bytes(training.images)));
  write_text(folder / "train-labels-idx1-ubyte.gz", gzip(bytes_of(training.labels)));
  write_text(folder / "t10k-images-idx3-ubyte", idx_bytes(testing.images));
  write_text(folder / "t10k-labels-idx1-ubyte", bytes_of(testing.labels));
}

std::string cifar_bytes(const zoo::ImageSet& set) {
  const at::Tensor rows = torch::cat(
      {set.labels.to(torch::kByte).unsqueeze(1), set.images.reshape({set.size(), -1})}, 1);
  return {static_cast<const char*>(rows.const_data_ptr()), rows.nbytes()};
}

void write_cifar10(const std::filesystem::path& folder, std::int64_t train, std::int64_t test) {
  const zoo::ImageSet training = made_up_colours(train, 1);
  const std::int64_t count = train / 5;
  for (std::int64_t i = 0; i < 5; ++i) {
    write_text(folder / ("data_batch_" + std::to_string(i + 1) + ".bin"),
               cifar_bytes({training.images.narrow(0, i * count, count),
                            training.labels.narrow(0, i * count, count)}));
  }
  write_text(folder / "test_batch.bin", cifar_bytes(made_up_colours(test, 2)));
}

}  // namespace semitone::test
