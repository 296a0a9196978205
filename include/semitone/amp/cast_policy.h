#pragma once

#include "semitone/amp/model.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace semitone::amp {

/// What autocast does with an operator's arguments. Eligible are fp32, fp16 and bf16 tensors on the
/// policy's device; fp64, integer and complex ones are left alone everywhere.
enum class CastAction {
  lower,  ///< cast to the policy's 16-bit dtype
  fp32,  ///< cast to fp32; an operator with a dtype argument gets dtype=float32 instead, unless the
         ///< caller gave one
  promote,  ///< cast to the 16-bit dtype, or to fp32 if any argument is fp32
  widest,   ///< cast to the widest argument: fp32 if any is, or if fp16 meets bf16; nothing is
            ///< lowered
  leave,    ///< run in whatever dtype arrives
  ban,      ///< an Error if an argument is 16-bit; fp32 arguments pass
};

/// "lower", "fp32", "promote", "widest", "leave", "ban".
std::string_view name_of(CastAction action);

/// One row of a policy.
struct CastRow {
  CastAction action;
  std::string reason;  ///< why, in a few words
};

/// How 16-bit operators are computed that the CPU has no fast kernels for (has_native_kernel):
/// matrix products, convolutions, LSTM and attention take their arguments to fp32, compute and sum
/// there, and round the result once — the numbers of a tensor core, forward and backward, at fp32's
/// speed instead of 10 to 500 times below it.
enum class Emulation {
  automatic,  ///< where a call needs a kernel that is missing, kind by kind, and for convolutions
              ///< that LibTorch's oneDNN gets wrong on processors with AMX (docs/numerics.md)
  always,     ///< everywhere: the same numbers on every machine
  never,      ///< LibTorch's own kernels, come what may
};

/// Device and 16-bit dtype of a policy. Converts from either; what is not given is default_device()
/// and default_16bit_dtype(device).
struct CastTarget {
  CastTarget();
  CastTarget(c10::DeviceType device_type);  // NOLINT(google-explicit-constructor)
  CastTarget(c10::ScalarType lower_dtype);  // NOLINT(google-explicit-constructor)
  CastTarget(c10::DeviceType device_type, c10::ScalarType lower_dtype);

  c10::DeviceType device;
  c10::ScalarType dtype;  ///< fp16 or bf16
};

/// Paddle's levels: O1 casts by white and black list, O2 keeps in fp32 only what is slower in 16
/// bits.
enum class PaddleLevel { O1, O2 };

class CompiledPolicy;

/// Which operators autocast runs in which precision: a value, a table from operator to action, with
/// a reason for every row.
///
///     auto policy =
///     CastPolicy::semitone(torch::kBFloat16).lower("softmax").keep_fp32("mylib::my_op").keep_fp32_params("head.*");
///     amp::Autocast region(policy.bind(*model));
///
/// Operators are called by their ATen names: "conv2d" means all its overloads, "conv2d.padding" one
/// of them, "mylib::my_op" one of another library (TORCH_LIBRARY). An unknown name is an Error that
/// proposes the nearest known ones. What is not in the table runs in whatever dtype arrives. Only
/// out-of-place operators can be cast: an in-place one or an out= overload writes to a tensor that
/// the caller chose, so for those only ban() and leave() are possible.
///
/// In C++, torch::nn::Linear and functional::linear call addmm (2-D input with bias) or matmul, not
/// linear: to change the precision of single layers, name their parameters with keep_fp32_params().
///
/// `semitone ops` prints the tables.
class CastPolicy {
 public:
  /// The default. On a GPU LibTorch's own list; on a CPU the same rows, but for those of five
  /// operators (layer_norm, native_layer_norm, group_norm, binary_cross_entropy, grid_sampler), and
  /// the rows that LibTorch's CPU list has besides, without its dtype errors. What differs between
  /// the devices stands in docs/cast_policies.md.
  static CastPolicy semitone(CastTarget target = {});
  /// Exactly LibTorch's own list for the device.
  static CastPolicy torch(CastTarget target = {});
  /// The lists of apex.amp O1 (commit e13873de), by the operators that those Python functions call.
  static CastPolicy apex(CastTarget target = {});
  /// The lists of paddle.amp 3.3, by the ATen operators that correspond.
  static CastPolicy paddle(CastTarget target = {}, PaddleLevel level = PaddleLevel::O1);
  /// An empty table: no casts. A region with it still computes 16-bit matrix products by Emulation:
  /// what models with 16-bit weights (O2, O3) run in.
  static CastPolicy none(CastTarget target = {});
  /// By name: semitone, torch, apex, paddle, paddle-o2 or none.
  static CastPolicy by_name(std::string_view name, CastTarget target = {});

  /// Edits. Each sets a row, new or in place of the old one. Error for an unknown operator.
  CastPolicy& lower(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& keep_fp32(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& promote(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& widest(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& leave(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& ban(std::string_view op, std::string_view reason = "set by the user");
  CastPolicy& set(std::string_view op, CastAction action,
                  std::string_view reason = "set by the user");

  /// Keeps the parameters whose names match a glob (*, ?, [abc]; * also matches dots) in fp32, and
  /// with them the operators that get one as an argument: those that this policy lists, whatever
  /// their action, and those that the preset `semitone` lists for the device, so that a kept
  /// parameter can meet 16-bit tensors under every policy, `none` of O2 and O3 included. Operators
  /// that stand in neither list get the parameter as it is, and LibTorch's own type promotion
  /// decides. So do those that write to an argument (in-place forms, out= overloads).
  ///
  /// Names need a model: see bind(). In a policy that is bound already the glob is resolved at once
  /// (Error if it matches nothing); Autocast refuses a policy with globs that is not bound.
  /// amp::initialize binds by itself.
  CastPolicy& keep_fp32_params(std::string_view glob);

  /// Default: automatic.
  CastPolicy& emulation(Emulation value);

  /// Whether an operator runs in Semitone's own kernel where that can do the arguments: one pass
  /// over memory instead of several, on the CPU; models need not know. What the kernels compute is
  /// what LibTorch's operators do, within rounding, and can be differentiated as often; dropout
  /// draws other random numbers, from the same generator. Rows decide about dtypes as before.
  ///
  /// fast_kernel names one, with an Error for an operator that has none; fast_kernels switches all
  /// of them. Default: all in preset semitone and in `none`, none in the others, which compute what
  /// their systems do. `semitone ops` marks them.
  CastPolicy& fast_kernel(std::string_view op, bool on = true);
  CastPolicy& fast_kernels(bool on);

  /// The same policy, for the parameters of a model: resolves the globs (Error if one matches
  /// nothing) and lets the weight-cast cache keep frozen parameters too. The policy remembers the
  /// parameters, it does not own them.
  CastPolicy bind(const Model& model) const;
  /// For several models at once: a glob has to match in one of them.
  CastPolicy bind(const std::vector<Model>& models) const;

  /// The same preset for another device or dtype, with the same edits: its rows are those that the
  /// preset has for that device.
  CastPolicy with_target(CastTarget target) const;

  std::string_view name() const { return name_; }
  c10::DeviceType device() const { return target_.device; }
  c10::ScalarType dtype() const { return target_.dtype; }
  Emulation emulation() const { return emulation_; }
  /// The operators of fast_kernel() that are on.
  const std::set<std::string>& fast_kernels() const { return fast_kernels_; }
  const std::vector<std::string>& fp32_param_globs() const { return globs_; }

  /// Whether bind() was called: whether the globs are resolved.
  bool is_bound() const { return binding_ != nullptr; }
  /// Whether bind() found that this parameter is to stay in fp32.
  bool keeps_fp32(const at::Tensor& parameter) const;

  /// The row of an operator; nothing where it is not listed. "conv2d" is here the overload without
  /// a name.
  std::optional<CastRow> find(std::string_view op) const;
  /// All rows by operator, in alphabetical order: "conv2d", "conv2d.padding", "mylib::my_op".
  const std::map<std::string, CastRow>& rows() const;

  /// For the library itself: the table in the form that the kernels read.
  std::shared_ptr<const CompiledPolicy> compiled() const;

 private:
  friend class PolicyBuilder;
  struct NamedParameter;
  struct Preset;    // its rows for one device, shared by all policies made of it
  struct Compiled;  // made at first use, shared by copies, replaced by edits

  using Binding = std::vector<NamedParameter>;  // the parameters of bind()
  using Rows = std::map<std::string, CastRow>;

  CastPolicy(std::string name, CastTarget target, std::shared_ptr<const Preset> preset);
  static void keep_matching(Binding& binding, const std::string& glob);
  void edited();

  std::string name_;
  CastTarget target_;
  std::shared_ptr<const Preset> preset_;
  Rows edits_;  // rows in place of the preset's
  std::vector<std::string> globs_;
  Emulation emulation_ = Emulation::automatic;
  std::set<std::string> fast_kernels_;
  std::shared_ptr<const Binding> binding_;
  std::shared_ptr<Compiled> compiled_;
};

}  // namespace semitone::amp
