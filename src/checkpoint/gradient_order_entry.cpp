// The order in which DistributedDataParallel sums gradients.

#include "semitone/core/error.h"
#include "semitone/parallel/gradient_order.h"
#include "src/checkpoint/entry.h"
#include "src/core/archive.h"

#include <torch/serialize.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::checkpoint {
namespace {

using parallel::GradientOrder;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr auto kBuckets = "buckets";
constexpr auto kBucketCap = "bucket_cap_mb";
constexpr auto kFirstBucket = "first_bucket_mb";

// A line for each bucket, with the names of its parameters. An order with a name that has one of
// these characters would not fit, and a warning would say so.
constexpr char kBetweenBuckets = '\n';
constexpr char kBetweenNames = '\t';

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (;;) {
    const std::size_t end = text.find(separator);
    parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::string to_text(const std::vector<std::vector<std::string>>& buckets) {
  std::vector<std::string> lines;
  lines.reserve(buckets.size());
  for (const auto& names : buckets)
    lines.push_back(fmt::format("{}", fmt::join(names, std::string(1, kBetweenNames))));
  return fmt::format("{}", fmt::join(lines, std::string(1, kBetweenBuckets)));
}

std::optional<GradientOrder> order_in(InputArchive& archive) {
  constexpr auto kResume = "checkpoint.resume";
  const auto text = find_value<std::string>(archive, kBuckets, kResume);
  if (!text.has_value()) return std::nullopt;
  GradientOrder order;
  for (const std::string& line : split(*text, kBetweenBuckets))
    order.buckets.push_back(split(line, kBetweenNames));
  order.bucket_cap_mb = read_value<double>(archive, kBucketCap, kResume);
  order.first_bucket_mb = read_value<double>(archive, kFirstBucket, kResume);
  return order;
}

class GradientOrderEntry final : public Entry {
 public:
  using Get = std::function<std::optional<GradientOrder>()>;
  using Set = std::function<void(const std::optional<GradientOrder>&)>;

  GradientOrderEntry(std::string name, Get get, Set set)
      : Entry(std::move(name), "gradient_order", PerRank::no),
        get_(std::move(get)),
        set_(std::move(set)) {}

  // Checkpoints are good without it: only the sums' last bits depend on it.
  bool may_be_missing() const override { return true; }

  void save(FileRecord&, const UseArchive& use) override {
    OutputArchive archive;
    if (const auto order = get_()) {
      archive.write(kBuckets, c10::IValue(to_text(order->buckets)));
      archive.write(kBucketCap, c10::IValue(order->bucket_cap_mb));
      archive.write(kFirstBucket, c10::IValue(order->first_bucket_mb));
    }
    use_content(archive, use);
  }

  void read(const Source& source, const FileRecord&) override {
    InputArchive archive = source.archive();
    saved_ = order_in(archive);
  }

  void after_reading() override {
    misfit_.clear();
    try {
      set_(std::exchange(saved_, std::nullopt));
    } catch (const CommError&) {
      throw;
    } catch (const Error& error) {
      misfit_ = error.what();
    }
  }

  // read() changes nothing.
  Undo set_aside() override {
    return [] {};
  }

  std::string not_restored(const FileRecord&) const override {
    if (misfit_.empty()) return {};
    return fmt::format(
        "the order of gradients of '{}' is not restored, sums may round differently: {}", name(),
        misfit_);
  }

 private:
  Get get_;
  Set set_;
  std::optional<GradientOrder> saved_;  // as read
  std::string misfit_;                  // of the last order
};

}  // namespace

std::unique_ptr<Entry> gradient_order_entry(
    std::string name, std::function<std::optional<GradientOrder>()> get,
    std::function<void(const std::optional<GradientOrder>&)> set) {
  return std::make_unique<GradientOrderEntry>(std::move(name), std::move(get), std::move(set));
}

}  // namespace semitone::checkpoint
