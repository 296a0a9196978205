#include "semitone/parallel/zero_redundancy_optimizer.h"

#include "semitone/core/detail/parameter_places.h"
#include "semitone/core/error.h"
#include "semitone/core/events.h"
#include "src/comm/process_group.h"
#include "src/core/archive.h"
#include "src/core/distinct_parameters.h"
#include "src/core/libtorch_states.h"
#include "src/parallel/agreement.h"

#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace semitone::parallel {
namespace {

constexpr auto kZero = "parallel.zero_redundancy_optimizer";

using ParamGroups = ZeroRedundancyOptimizer::ParamGroups;
using ParametersByGroup = std::vector<std::vector<at::Tensor>>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using State = std::remove_reference_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;

ParametersByGroup parameters_of(const ParamGroups& groups) {
  ParametersByGroup parameters;
  for (const auto& group : groups) parameters.push_back(group.params());
  return parameters;
}

bool are_same(const ParametersByGroup& a, const ParametersByGroup& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& one, const auto& other) {
    return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                      [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
  });
}

OptimizerPtr make(const ZeroRedundancyOptimizer::Factory& make_optimizer, ParamGroups groups) {
  const ParametersByGroup given = parameters_of(groups);
  OptimizerPtr optimizer = make_optimizer == nullptr ? nullptr : make_optimizer(std::move(groups));
  if (optimizer == nullptr) throw Error(kZero, "an optimizer from the factory", "none");
  if (!are_same(parameters_of(optimizer->param_groups()), given)) {
    throw Error(kZero, "an optimizer of the parameter groups that the factory was given",
                "one of others", "pass them to the optimizer's constructor unchanged");
  }
  if (dynamic_cast<const torch::optim::LBFGS*>(optimizer.get()) != nullptr) {
    throw Error(kZero, "an optimizer that steps each parameter independently", "LBFGS",
                "it combines all gradients: use another optimizer");
  }
  return optimizer;
}

// The memory that a parameter certainly uses. Of one with gaps, that is its first element: others
// may lie between its elements.
struct Memory {
  Memory(const at::Tensor& parameter, std::size_t order_, std::string name_)
      : begin(static_cast<const char*>(parameter.const_data_ptr())),
        order(order_),
        name(std::move(name_)) {
    const bool has_gaps = !parameter.is_non_overlapping_and_dense();
    end = begin + (has_gaps ? parameter.itemsize() : parameter.nbytes());
  }

  const char* begin;
  const char* end;
  std::size_t order;  // in the groups
  std::string name;
};

// Two parameters that share memory, each of which another rank may step; empty if there are none. A
// parameter that stands in the groups twice has one owner.
std::string overlap_in(const ParamGroups& groups) {
  std::vector<Memory> all;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& parameter = groups[g].params()[i];
      if (parameter.layout() != at::kStrided || parameter.is_meta() || parameter.numel() == 0 ||
          !seen.insert(parameter.unsafeGetTensorImpl()).second)
        continue;
      all.emplace_back(parameter, all.size(), fmt::format("parameter {} of group {}", i, g));
    }
  }
  // Of those at one address, the earlier one first.
  std::sort(all.begin(), all.end(), [](const Memory& a, const Memory& b) {
    return std::tie(a.begin, a.order) < std::tie(b.begin, b.order);
  });
  for (std::size_t i = 1; i < all.size(); ++i) {
    if (all[i].begin < all[i - 1].end) {
      return fmt::format("{} in the memory of {}: register one tensor in both places", all[i].name,
                         all[i - 1].name);
    }
  }
  return {};
}

void require_same_parameters(const ParamGroups& groups, const comm::Group& group) {
  std::vector<Property> properties;
  std::string problem;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& parameter = groups[g].params()[i];
      const std::string name = fmt::format("parameter {} of group {}", i, g);
      properties.push_back({name, describe_layout(parameter)});
      if (!problem.empty()) continue;
      problem = parameter.layout() == at::kStrided ? unfit_to_send(parameter, name, group)
                                                   : name + " that is not dense";
    }
  }
  if (properties.empty()) problem = "no parameters";
  if (problem.empty() && group.size() > 1) problem = overlap_in(groups);
  require_agreement(
      properties, std::move(problem), group,
      {.component = kZero,
       .expected = "the same parameters on every rank",
       .remedy = "construct the model and its optimizer in the same way on all ranks"});
}

// Lends an optimizer its state for a while.
class LentState {
 public:
  LentState(torch::optim::Optimizer& to, State& state) : to_(to.state()), state_(state) {
    to_.swap(state_);
  }
  ~LentState() { to_.swap(state_); }
  LentState(const LentState&) = delete;
  LentState& operator=(const LentState&) = delete;

 private:
  State& to_;
  State& state_;
};

std::string to_text(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return std::move(stream).str();
}

void from_text(torch::optim::Optimizer& optimizer, std::string text, c10::Device device) {
  std::istringstream stream(std::move(text));
  torch::serialize::InputArchive archive;
  archive.load_from(stream, device);
  const DistinctParameters distinct(optimizer);
  optimizer.load(archive);
}

Error saves_nothing(const char* function) {
  return {fmt::format("{}.{}", kZero, function), "an optimizer that saves its state",
          "one that saves nothing",
          "override save() and load() of torch::optim::Optimizer in its class"};
}

}  // namespace

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters,
                                                 const Factory& make_optimizer, comm::Group group)
    : ZeroRedundancyOptimizer(ParamGroups{torch::optim::OptimizerParamGroup(std::move(parameters))},
                              make_optimizer, std::move(group)) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(ParamGroups groups, const Factory& make_optimizer,
                                                 comm::Group group)
    : ZeroRedundancyOptimizer(make(make_optimizer, std::move(groups)), make_optimizer,
                              std::move(group)) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(OptimizerPtr whole, Factory make_optimizer,
                                                 comm::Group group)
    : Optimizer(ParamGroups(), whole->defaults().clone()),
      make_optimizer_(std::move(make_optimizer)),
      group_(std::move(group)) {
  // LibTorch 2.15's function drops options of classes that it does not know.
  for (const auto& one : whole->param_groups()) param_groups_.emplace_back(one);
  update_share();
}

// Parameters stay where their state is, when a group gets or loses others. Those in the place of
// others in a group of the same size have replaced them, as fp32 masters do.
void ZeroRedundancyOptimizer::keep_owners(std::unordered_map<const c10::TensorImpl*, int>& owner_of,
                                          std::vector<std::int64_t>& elements) const {
  std::unordered_map<const c10::TensorImpl*, int> before;
  for (std::size_t g = 0; g < owners_.size(); ++g) {
    for (std::size_t i = 0; i < owners_[g].size(); ++i)
      before.emplace(parameters_[g][i].unsafeGetTensorImpl(), owners_[g][i]);
  }
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& parameters = param_groups_[g].params();
    const bool is_as_long = g < owners_.size() && owners_[g].size() == parameters.size();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const c10::TensorImpl* const parameter = parameters[i].unsafeGetTensorImpl();
      const auto found = before.find(parameter);
      if (found == before.end() && !is_as_long) continue;
      const int owner = found == before.end() ? owners_[g][i] : found->second;
      if (owner_of.emplace(parameter, owner).second)
        elements[static_cast<std::size_t>(owner)] += parameters[i].numel();
    }
  }
}

std::vector<std::vector<int>> ZeroRedundancyOptimizer::owners() const {
  std::vector<std::int64_t> elements(static_cast<std::size_t>(group_.size()));
  std::unordered_map<const c10::TensorImpl*, int> owner_of;  // some stand there twice
  keep_owners(owner_of, elements);
  std::vector<std::vector<int>> owners;
  for (const auto& group : param_groups_) {
    const auto& parameters = group.params();
    std::vector<std::size_t> order(parameters.size());
    std::iota(order.begin(), order.end(), 0);
    // The largest first, and equal ones in their order.
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return std::pair(parameters[b].numel(), a) < std::pair(parameters[a].numel(), b);
    });
    std::vector<int>& of_group = owners.emplace_back(parameters.size());
    for (const std::size_t i : order) {
      const auto least = std::min_element(elements.begin(), elements.end());
      const auto [owner, added] = owner_of.try_emplace(parameters[i].unsafeGetTensorImpl(),
                                                       static_cast<int>(least - elements.begin()));
      if (added) *least += parameters[i].numel();
      of_group[i] = owner->second;
    }
  }
  return owners;
}

ParamGroups ZeroRedundancyOptimizer::share_of(int rank) const {
  const auto owners = this->owners();
  ParamGroups share;
  for (std::size_t g = 0; g < param_groups_.size(); ++g) {
    std::vector<at::Tensor> parameters;
    for (std::size_t i = 0; i < owners[g].size(); ++i) {
      if (owners[g][i] == rank) parameters.push_back(param_groups_[g].params()[i]);
    }
    share.emplace_back(std::move(parameters), param_groups_[g].options().clone());
  }
  return share;
}

// Adapts to changes of the parameter groups.
void ZeroRedundancyOptimizer::update_share() {
  ParametersByGroup now = parameters_of(param_groups_);
  if (local_ == nullptr || !are_same(now, parameters_)) {
    require_same_parameters(param_groups_, group_);
    auto owners = this->owners();
    local_ = make(make_optimizer_, share_of(group_.rank()));  // options are set below
    // Some classes, such as Adagrad, make their state in the constructor.
    for (auto& [parameter, made] : local_->state()) {
      auto& kept = state_[parameter];
      if (kept == nullptr) kept = std::move(made);
    }
    local_->state().clear();
    if (auto* const placed = dynamic_cast<semitone::detail::UsesParameterPlaces*>(local_.get()))
      placed->set_parameter_places(semitone::detail::places_of(param_groups_));
    parameters_ = std::move(now);
    owners_ = std::move(owners);
    shares_.assign(static_cast<std::size_t>(group_.size()), {});
    std::unordered_set<const c10::TensorImpl*> seen;
    for (std::size_t g = 0; g < owners_.size(); ++g) {
      for (std::size_t i = 0; i < owners_[g].size(); ++i) {
        const at::Tensor& parameter = parameters_[g][i];
        if (seen.insert(parameter.unsafeGetTensorImpl()).second)
          shares_[static_cast<std::size_t>(owners_[g][i])].push_back(parameter);
      }
    }
  }
  for (std::size_t g = 0; g < param_groups_.size(); ++g)
    local_->param_groups()[g].set_options(param_groups_[g].options().clone());
  const auto* const placed =
      dynamic_cast<const semitone::detail::UsesParameterPlaces*>(local_.get());
  if (group_.size() > 1 && placed != nullptr && placed->combines_gradients()) {
    throw Error(kZero, "an optimizer that steps each parameter independently",
                "one with max_grad_norm, which needs the norm of all gradients",
                "set max_grad_norm to 0, and clip the gradients before the step");
  }
}

at::Tensor ZeroRedundancyOptimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_grad(true);
    loss = closure();
  }
  consolidated_.reset();
  update_share();
  {
    const events::PhaseScope phase(events::Phase::optimizer);
    const LentState lent(*local_, state_);
    add_initial_states(*local_);
    try {
      local_->step();
    } catch (...) {
      // Otherwise the others would wait for this rank's parameters.
      if (group_.size() > 1)
        group_.impl()->watch->report_lost("left an optimizer's step by an exception");
      throw;
    }
  }
  for (int owner = 0; owner < group_.size(); ++owner) {
    const auto& share = shares_[static_cast<std::size_t>(owner)];
    if (group_.size() == 1 || share.empty()) continue;
    const events::PhaseScope phase(events::Phase::communication);
    comm::broadcast_unchecked(group_, share, owner);
  }
  return loss;
}

void ZeroRedundancyOptimizer::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  Optimizer::add_param_group(group);
  // The group's options as the unsharded optimizer completes them.
  const OptimizerPtr alone = make(make_optimizer_, {group});
  param_groups_.back().set_options(alone->param_groups()[0].options().clone());
}

// An optimizer with the options of these groups, which LibTorch 2.15 would mix with its defaults,
// and without the state that some classes make in their constructor.
OptimizerPtr ZeroRedundancyOptimizer::make_with_options(const ParamGroups& groups) const {
  OptimizerPtr optimizer = make(make_optimizer_, groups);
  optimizer->state().clear();
  for (std::size_t g = 0; g < groups.size(); ++g)
    optimizer->param_groups()[g].set_options(groups[g].options().clone());
  return optimizer;
}

// An optimizer of these parameters with the state that this rank has of them. They share it.
OptimizerPtr ZeroRedundancyOptimizer::with_state(const ParamGroups& groups) const {
  OptimizerPtr optimizer = make_with_options(groups);
  for (const auto& group : optimizer->param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      if (found != state_.end()) optimizer->state()[found->first] = found->second->clone();
    }
  }
  return optimizer;
}

// The save() of torch::optim::Optimizer writes nothing: the state would be lost without a word. One
// parameter's state shows it.
bool ZeroRedundancyOptimizer::loses_state() const {
  const OptimizerPtr probe = with_state(share_of(group_.rank()));
  if (probe->state().empty()) return false;
  probe->state().erase(std::next(probe->state().begin()), probe->state().end());
  torch::serialize::OutputArchive archive;
  probe->save(archive);
  return reread(archive).keys().empty();
}

void ZeroRedundancyOptimizer::consolidate(int to_rank) {
  if (to_rank < 0 || to_rank >= group_.size()) {
    throw Error(std::string(kZero) + ".consolidate",
                fmt::format("a rank from 0 to {}", group_.size() - 1), std::to_string(to_rank));
  }
  update_share();
  consolidated_.reset();
  comm::announce(group_, "consolidate", fmt::format("to rank {}", to_rank));
  // Some ranks may have no state.
  const std::vector<std::string> lost = group_.all_gather(std::string(loses_state() ? "lost" : ""));
  if (std::ranges::find(lost, "lost") != lost.end()) throw saves_nothing("consolidate");
  const bool receives = group_.rank() == to_rank;
  if (!receives)
    return comm::send_string(group_, to_text(*with_state(share_of(group_.rank()))), to_rank);
  OptimizerPtr whole = make_with_options(param_groups_);
  for (int owner = 0; owner < group_.size(); ++owner) {
    std::string text = owner == to_rank ? to_text(*with_state(share_of(owner)))
                                        : comm::receive_string(group_, owner);
    const OptimizerPtr share = make_with_options(share_of(owner));
    from_text(*share, std::move(text), at::kCPU);
    for (auto& [parameter, state] : share->state()) whole->state()[parameter] = std::move(state);
  }
  consolidated_ = std::move(whole);
}

void ZeroRedundancyOptimizer::save(torch::serialize::OutputArchive& archive) const {
  if (group_.size() == 1) {
    save_share(archive);
  } else if (consolidated_ != nullptr) {
    consolidated_->save(archive);
  } else {
    throw Error(std::string(kZero) + ".save",
                fmt::format("the state of all ranks on rank {}", group_.rank()),
                "none that is newer than the last step",
                fmt::format("call consolidate({}) on all ranks before", group_.rank()));
  }
}

void ZeroRedundancyOptimizer::save_share(torch::serialize::OutputArchive& archive) const {
  if (loses_state()) throw saves_nothing("save_share");
  with_state(param_groups_)->save(archive);
}

void ZeroRedundancyOptimizer::load(torch::serialize::InputArchive& archive) {
  const OptimizerPtr whole = make_with_options(param_groups_);
  try {
    const DistinctParameters distinct(*whole);
    whole->load(archive);
  } catch (const c10::Error& error) {
    throw FileError(std::string(kZero) + ".load",
                    "what this kind of optimizer saved for such parameter groups",
                    error.what_without_backtrace());
  }
  require_states_fit(*whole, std::string(kZero) + ".load", "the optimizer");
  const OptimizerPtr share = make_with_options(share_of(group_.rank()));
  std::optional<c10::Device> device;
  for (const auto& group : share->param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      device = parameter.device();
      const auto found = whole->state().find(parameter.unsafeGetTensorImpl());
      if (found != whole->state().end() && found->second != nullptr)  // null: tied, moved before
        share->state()[found->first] = std::move(found->second);
    }
  }
  // Moves the state from the archive's device, usually the CPU, to the parameters'. A state is
  // opaque, but archives can be read to any device.
  if (device.has_value()) from_text(*share, to_text(*share), *device);
  for (std::size_t g = 0; g < param_groups_.size(); ++g)
    assign_options(param_groups_[g], whole->param_groups()[g].options());
  state_ = std::move(share->state());
  consolidated_.reset();
}

}  // namespace semitone::parallel
