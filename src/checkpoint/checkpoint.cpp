#include "semitone/checkpoint/checkpoint.h"

#include "semitone/core/error.h"
#include "src/checkpoint/checkpoint_impl.h"
#include "src/checkpoint/manifest.h"
#include "src/checkpoint/own_directories.h"
#include "src/core/archive.h"
#include "src/core/env.h"
#include "src/core/log.h"
#include "src/core/utf8.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <torch/serialize.h>

#include <fmt/format.h>

#include <map>
#include <string_view>
#include <system_error>
#include <utility>

namespace semitone::checkpoint {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr auto kRandom = "random";
constexpr auto kValue = "value";

// Whether a name ends like that of a rank's file: ".rank0".
bool is_of_a_rank(const std::string& name) {
  const std::size_t digits = name.find_last_not_of("0123456789") + 1;
  return digits < name.size() && std::string_view(name).substr(0, digits).ends_with(".rank");
}

// Ranks that do not know of each other would replace each other's checkpoints.
void warn_without_group(const comm::Group& group) {
  const std::string ranks = env::get(env::kWorldSize).value_or("1");
  if (group.size() > 1 || ranks == "1") return;
  log()->warn(
      "[checkpoint] expected a group of {} ranks, as WORLD_SIZE says, got none: pass "
      "CheckpointOptions().group(group), or give each rank its own directory",
      ranks);
}

}  // namespace

CheckpointOptions& CheckpointOptions::keep(std::optional<std::int64_t> count) {
  if (count.has_value() && *count < 1) {
    throw Error("checkpoint.options", "to keep at least 1 checkpoint", std::to_string(*count),
                "std::nullopt keeps all");
  }
  keep_ = count;
  return *this;
}

CheckpointOptions& CheckpointOptions::keep_best(std::int64_t count, Best best) {
  if (count < 1)
    throw Error("checkpoint.options", "to keep at least 1 best checkpoint", std::to_string(count));
  keep_best_ = count;
  best_ = best;
  return *this;
}

Checkpoint::Impl::Impl(std::filesystem::path folder, const CheckpointOptions& given)
    : directory(std::move(folder)), options(given) {
  if (directory.empty()) throw Error("checkpoint", "a directory", "an empty path");
  // Also if the process changes its own directory, or others let a link point elsewhere.
  directory = std::filesystem::absolute(directory);
  std::error_code error;
  const auto resolved = std::filesystem::weakly_canonical(directory, error);
  if (!error) directory = resolved;
  if (!directory.has_filename()) directory = directory.parent_path();  // "runs/7/"
  warn_without_group(options.group());
  if (!options.default_generators()) return;
  entries.push_back(generators_entry(
      kRandom, "default_generators", [this] { return default_generators(); }, /*optional=*/true));
}

NamedGenerators Checkpoint::Impl::default_generators() const {
  NamedGenerators generators{{"cpu", at::detail::getDefaultCPUGenerator()}};
  std::map<c10::DeviceType, std::set<c10::DeviceIndex>> devices;
  for (const auto& entry : entries) {
    for (const c10::Device device : entry->devices()) {
      if (!device.is_cpu()) devices[device.type()].insert(device.index());
    }
  }
  for (const auto& [type, indices] : devices) {
    // Counted: a resumed run may be given other devices of the kind.
    int number = 0;
    for (const c10::DeviceIndex index : indices) {
      generators.emplace_back(
          fmt::format("{}.{}", c10::DeviceTypeName(type, /*lower_case=*/true), number++),
          at::globalContext().defaultGenerator(c10::Device(type, index)));
    }
  }
  return generators;
}

void Checkpoint::Impl::add(std::unique_ptr<Entry> entry) {
  const std::string& name = entry->name();
  if (is_of_a_rank(name))
    throw Error("checkpoint.add", "a name that does not end like that of a rank's file", name);
  if (!is_entry_name(name) || name == kRandom) {
    throw Error("checkpoint.add",
                "a name of letters, digits, '_', '-' and '.', which begins with a letter or digit, "
                "and is not 'random'",
                "'" + name + "'");
  }
  for (const auto& other : entries) {
    if (other->name() == name)
      throw Error("checkpoint.add", "names that differ", "'" + name + "' twice");
  }
  const auto place = std::upper_bound(
      entries.begin(), entries.end(), entry,
      [](const auto& added, const auto& other) { return added->turn() < other->turn(); });
  entries.insert(place, std::move(entry));
}

Checkpoint::Checkpoint(std::filesystem::path directory, const CheckpointOptions& options)
    : impl_(std::make_unique<Impl>(std::move(directory), options)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

Checkpoint& Checkpoint::add(const std::string& name, const amp::Model& model) {
  impl_->add(model_entry(name, model, impl_->mixed));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::optim::Optimizer& optimizer) {
  impl_->add(optimizer_entry(name, optimizer, impl_->options.group()));
  impl_->optimizers->push_back(&optimizer);
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, amp::MixedPrecision& mixed) {
  impl_->add(mixed_entry(name, mixed, impl_->optimizers));
  impl_->mixed->push_back(&mixed);
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, std::string& value, PerRank per_rank) {
  impl_->add(state_entry(
      name, "string",
      {.save = [&value](OutputArchive& archive) { archive.write(kValue, c10::IValue(value)); },
       .load =
           [&value](InputArchive& archive) {
             value = read_value<std::string>(archive, kValue, "checkpoint.resume");
           }},
      per_rank));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, at::Tensor& value, PerRank per_rank) {
  impl_->add(tensor_entry(name, value, per_rank));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, const at::Generator& generator) {
  if (!generator.defined())
    throw Error("checkpoint.add", "a generator for '" + name + "'", "an undefined one");
  impl_->add(generators_entry(
      name, "generator", [generator] { return NamedGenerators{{"generator", generator}}; },
      /*optional=*/false));
  return *this;
}

Checkpoint& Checkpoint::add_setting(const std::string& name, const std::string& value) {
  if (name.empty()) throw Error("checkpoint.add_setting", "a name", "an empty text");
  if (!is_utf8(name) || !is_utf8(value))
    throw Error("checkpoint.add_setting", "a name and a value in UTF-8", name + " " + value);
  if (!impl_->settings.emplace(name, value).second)
    throw Error("checkpoint.add_setting", "names that differ", "'" + name + "' twice");
  return *this;
}

Checkpoint& Checkpoint::add_gradient_order(
    const std::string& name, std::function<std::optional<parallel::GradientOrder>()> get,
    std::function<void(const std::optional<parallel::GradientOrder>&)> set) {
  impl_->add(gradient_order_entry(name, std::move(get), std::move(set)));
  return *this;
}

Checkpoint& Checkpoint::add_state(const std::string& name, SaveState save, LoadState load,
                                  LoadResharded load_resharded, PerRank per_rank) {
  impl_->add(state_entry(name, "state",
                         {std::move(save), std::move(load), std::move(load_resharded)}, per_rank));
  return *this;
}

Checkpoint& Checkpoint::add_integer(const std::string& name, std::function<std::int64_t()> get,
                                    std::function<void(std::int64_t)> set, const Limits& limits,
                                    PerRank per_rank) {
  const auto load = [name, set = std::move(set), limits](InputArchive& archive) {
    const auto value = read_value<std::int64_t>(archive, kValue, "checkpoint.resume");
    if (value < limits.least || value > limits.most) {
      throw FileError("checkpoint.resume",
                      fmt::format("{} to {} for '{}'", limits.least, limits.most, name),
                      std::to_string(value), "use a wider type");
    }
    set(value);
  };
  const auto save = [get = std::move(get)](OutputArchive& archive) {
    archive.write(kValue, c10::IValue(get()));
  };
  impl_->add(state_entry(name, "integer", {.save = save, .load = load}, per_rank));
  return *this;
}

Checkpoint& Checkpoint::add_real(const std::string& name, std::function<double()> get,
                                 std::function<void(double)> set, PerRank per_rank) {
  impl_->add(state_entry(
      name, "real",
      {.save = [get = std::move(get)](
                   OutputArchive& archive) { archive.write(kValue, c10::IValue(get())); },
       .load =
           [set = std::move(set)](InputArchive& archive) {
             set(read_value<double>(archive, kValue, "checkpoint.resume"));
           }},
      per_rank));
  return *this;
}

void Checkpoint::save(std::int64_t step, std::optional<double> metric) {
  impl_->save(step, metric);
}

void Checkpoint::save_async(std::int64_t step, std::optional<double> metric) {
  impl_->save_async(step, metric);
}

void Checkpoint::wait_for_copy() {
  impl_->wait_for_copy();
}

void Checkpoint::wait() {
  impl_->wait();
}

std::optional<std::int64_t> Checkpoint::resume() {
  impl_->wait();
  const auto step = impl_->resume();
  note_own(impl_->directory);
  return step;
}

void Checkpoint::resume(std::int64_t step) {
  impl_->wait();
  impl_->resume(step);
  note_own(impl_->directory);
}

const std::filesystem::path& Checkpoint::directory() const {
  return impl_->directory;
}

std::filesystem::path Checkpoint::path_of(std::int64_t step) const {
  return complete_path(impl_->directory, step);
}

std::optional<std::int64_t> Checkpoint::best_step() const {
  impl_->wait();
  return impl_->best_step();
}

std::vector<std::int64_t> Checkpoint::steps() const {
  return steps_in(impl_->directory);
}

}  // namespace semitone::checkpoint
