#include "semitone/autocast/autocast.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/state_mode.h"
#include "src/scaling/masters.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

// Weights have states too. A pair agrees while both versions and addresses are those recorded by
// agreed(). pull() copies changed elements of a parameter to its master; sync() also rounds a
// changed master into its parameter. maybe_stepped_ stands for changes of masters that no version
// counter shows.

namespace semitone::amp {

namespace {

// Where a 16-bit tensor is not what exact values round to. Compared by their bits, which are those
// of a NaN too.
at::Tensor differ(const at::Tensor& value, const at::Tensor& exact) {
  return value.view(at::kShort).ne(exact.to(value.scalar_type()).view(at::kShort));
}

}  // namespace

void Masters::agreed(Pair& pair) {
  pair.parameter_version = static_cast<std::uint32_t>(pair.parameter._version());
  pair.parameter_data = pair.parameter.const_data_ptr();
  pair.parameter_probes = probe(pair.parameter);
  pair.master_version = static_cast<std::uint32_t>(pair.master._version());
  pair.master_data = pair.master.const_data_ptr();
  pair.master_probes = probe(pair.master);
  pair.replaced = {};
}

bool Masters::parameter_changed(const Pair& pair) {
  return pair.parameter_version != static_cast<std::uint32_t>(pair.parameter._version()) ||
         pair.parameter_data != pair.parameter.const_data_ptr() ||
         pair.parameter_probes != probe(pair.parameter);
}

bool Masters::master_changed(const Pair& pair) {
  return pair.master_version != static_cast<std::uint32_t>(pair.master._version()) ||
         pair.master_data != pair.master.const_data_ptr();
}

Masters::Probes Masters::probe(const at::Tensor& tensor) {
  Probes probes = {};
  if (!tensor.is_cpu() || !tensor.has_storage() || tensor.storage().data() == nullptr ||
      !tensor.is_non_overlapping_and_dense() || tensor.numel() == 0)
    return probes;
  const auto stride = static_cast<std::size_t>(tensor.element_size());
  const std::size_t size = std::min(stride, sizeof(probes[0]));
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  const auto last = static_cast<std::size_t>(tensor.numel()) - 1;
  for (std::size_t i = 0; i < probes.size(); ++i)
    std::memcpy(&probes[i], data + last * i / (probes.size() - 1) * stride, size);
  return probes;
}

// Whether optimizer.step() has changed a master, and the model does not have that yet. LibTorch's SGD
// changes no version.
bool Masters::is_ahead(const Pair& pair) const {
  return maybe_stepped_ && (master_changed(pair) || probe(pair.master) != pair.master_probes);
}

void Masters::require_updated_model() const {
  if (std::ranges::none_of(pairs_,
                           [&](const Pair& pair) { return pair.in_groups && is_ahead(pair); }))
    return;
  throw Error("amp.master_weights", "a loss of the weights after optimizer.step()",
              "one of those before: the step has only updated the fp32 masters",
              "call mixed.step(optimizer), which updates the model too, instead of "
              "optimizer.step(); or compute the loss with mixed.forward(model, …)");
}

// A program has changed a parameter in place. If optimizer.step() was called before, and the model
// was not updated since, the change is one of the weights before that step, which would be lost.
void Masters::require_updated_model(const Pair& pair) const {
  if (pair.parameter_data != pair.parameter.const_data_ptr() || !is_ahead(pair)) return;
  throw Error("amp.master_weights", "weights that are changed after the model was updated",
              "a weight that was changed in place after optimizer.step() had only updated its fp32 "
              "master",
              "call mixed.step(optimizer), which updates the model, instead of optimizer.step(); "
              "or change the weights inside mixed.fp32_weights(model). In C, call "
              "semitone_masters_write_model() after the step");
}

// An element equal to its rounded master was not changed, so the master's exact value stays.
void Masters::take_parameter(Pair& pair) {
  const at::Tensor value = pair.parameter.detach();
  if (value.sizes() != pair.master.sizes()) {
    throw Error("amp.master_weights",
                c10::str("a parameter of shape ", pair.master.sizes(), ", as at construction"),
                c10::str(value.sizes()), "was a file of another model loaded into it?");
  }
  const bool comparable = is_16bit(value.scalar_type()) && value.device() == pair.master.device() &&
                          !master_changed(pair);
  if (!comparable) {
    pair.master.copy_(value);
    agreed(pair);
    return;
  }
  const at::Tensor differs = differ(value, pair.master);
  const at::Tensor taken = with_replaced(pair, value, at::where(differs, value, pair.master));
  keep_replaced(pair, differs);
  pair.master.copy_(taken);
  Replaced replaced = std::move(pair.replaced);
  agreed(pair);
  pair.replaced = std::move(replaced);
}

// The elements that a parameter has got back are those that were replaced.
at::Tensor Masters::with_replaced(const Pair& pair, const at::Tensor& value,
                                  const at::Tensor& otherwise) {
  const auto& [places, values] = pair.replaced;
  if (!values.defined()) return otherwise;
  if (!places.defined()) return at::where(differ(value, values), otherwise, values);
  const at::Tensor result = otherwise.reshape(-1);
  const at::Tensor now = value.reshape(-1).index_select(0, places);
  return result
      .index_copy(0, places, at::where(differ(now, values), result.index_select(0, places), values))
      .view(otherwise.sizes());
}

// Remembers the elements of the master that are about to be replaced: all of them where they are
// many. The first replaced are the exact ones.
void Masters::keep_replaced(Pair& pair, const at::Tensor& differs) {
  auto& [places, values] = pair.replaced;
  if (values.defined() && !places.defined()) return;  // all are remembered
  const at::Tensor fresh = differs.reshape(-1).nonzero().squeeze(1);
  if (fresh.numel() == 0) return;
  const at::Tensor master = pair.master.reshape(-1);
  if (!values.defined() && 4 * fresh.numel() <= master.numel()) {
    places = fresh;
    values = master.index_select(0, fresh);
    return;
  }
  const at::Tensor all = values.defined() ? master.index_copy(0, places, values) : master.clone();
  places.reset();
  values = all.view(pair.master.sizes());
}

void Masters::pull() {
  const StateMode mode;
  adopt({});
  // All first: pairs may have memory in common.
  for (const Pair& pair : pairs_)
    if (pair.in_groups && parameter_changed(pair)) require_updated_model(pair);
  for (Pair& pair : pairs_)
    if (pair.in_groups && parameter_changed(pair)) take_parameter(pair);
}

void Masters::sync() {
  const StateMode mode;
  pull();
  for (Pair& pair : pairs_) {
    if (!pair.in_groups) continue;
    if (master_changed(pair)) {
      pair.parameter.copy_(pair.master);
      agreed(pair);
    } else if (maybe_stepped_) {
      // Usually it did not step, and a graph that saved the parameter must stay valid: no new
      // version.
      pair.parameter.variable_data().copy_(pair.master);
      pair.parameter_probes = probe(pair.parameter);
      pair.master_probes = probe(pair.master);
    }
  }
  if (maybe_stepped_) clear_cast_cache();
}

void Masters::write_model() {
  const StateMode mode;
  follow_groups();
  for (Pair& pair : pairs_) {
    if (!pair.in_groups) continue;
    pair.parameter.copy_(pair.master);
    agreed(pair);
  }
  maybe_stepped_ = false;
}

}  // namespace semitone::amp
