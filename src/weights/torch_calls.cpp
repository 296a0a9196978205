#include "src/weights/torch_calls.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/weights/dtype_names.h"
#include "src/weights/tensor_bytes.h"

#include <array>
#include <stdexcept>
#include <utility>

namespace semitone::weights {
namespace {

constexpr auto kStorages = std::to_array<DtypeName>({
    {"DoubleStorage", at::kDouble},
    {"FloatStorage", at::kFloat},
    {"HalfStorage", at::kHalf},
    {"BFloat16Storage", at::kBFloat16},
    {"LongStorage", at::kLong},
    {"IntStorage", at::kInt},
    {"ShortStorage", at::kShort},
    {"CharStorage", at::kChar},
    {"ByteStorage", at::kByte},
    {"BoolStorage", at::kBool},
    {"ComplexFloatStorage", at::kComplexFloat},
    {"ComplexDoubleStorage", at::kComplexDouble},
    // Of quantised tensors, which are not read.
    {"QInt8Storage", at::kQInt8},
    {"QUInt8Storage", at::kQUInt8},
    {"QInt32Storage", at::kQInt32},
    {"QUInt4x2Storage", at::kQUInt4x2},
    {"QUInt2x4Storage", at::kQUInt2x4},
});

// LibTorch's names of storages that Python has no class for. It gives them to its own files.
constexpr auto kStoragesOfLibTorch = std::to_array<DtypeName>({
    {"Float8_e4m3fnStorage", at::kFloat8_e4m3fn},
    {"Float8_e5m2Storage", at::kFloat8_e5m2},
    {"UInt16Storage", at::kUInt16},
    {"UInt32Storage", at::kUInt32},
    {"UInt64Storage", at::kUInt64},
});

// Names of Python's dtypes that have no storage class.
constexpr auto kOtherDtypes = std::to_array<DtypeName>({
    {"float8_e4m3fn", at::kFloat8_e4m3fn},
    {"float8_e5m2", at::kFloat8_e5m2},
    {"uint16", at::kUInt16},
    {"uint32", at::kUInt32},
    {"uint64", at::kUInt64},
});

// "float8_e5m2" of "torch.float8_e5m2".
std::string_view last_part(std::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

constexpr std::size_t kMaxKey = 100;

// What differs from the calls that PyTorch writes.
class Problem : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Arguments of a call, or parts of a tuple, with their types checked.
class Arguments {
 public:
  explicit Arguments(const List& list, Copies* copies = nullptr) : list_(list), copies_(copies) {}

  [[noreturn]] static void refuse(const std::string& got) { throw Problem(got); }

  std::size_t size() const { return list_.items.size(); }

  const Value& at(std::size_t index) const {
    if (index >= size()) refuse(std::to_string(size()) + " arguments");
    return *list_.items[index];
  }

  template <typename T>
  const T& get(std::size_t index) const {
    const T* held = at(index).get<T>();
    if (held == nullptr) refuse("an argument of another type at " + std::to_string(index));
    return *held;
  }

  // Refuses what would copy more than a pickle may.
  void count(std::size_t items) const {
    if (copies_ == nullptr) return;
    if (items > copies_->most - copies_->made) refuse("more than any list of weights has");
    copies_->made += items;
  }

  std::vector<std::int64_t> integers(std::size_t index) const {
    const auto& items = get<List>(index).items;
    if (items.size() > kMaxDimensions) refuse(std::to_string(items.size()) + " dimensions");
    count(items.size());
    std::vector<std::int64_t> numbers;
    for (const Value* item : items) {
      const auto* number = item->get<std::int64_t>();
      if (number == nullptr) refuse("an argument that is no tuple of integers");
      numbers.push_back(*number);
    }
    return numbers;
  }

 private:
  const List& list_;
  Copies* copies_;
};

// torch._utils._rebuild_tensor(storage, offset, sizes, strides), _v2 with requires_grad and hooks
// behind, _v3 with a dtype behind those, for storages of bytes.
TensorInStorage tensor_of(const Arguments& call) {
  const Storage& storage = call.get<Storage>(0);
  if (!storage.problem.empty()) Arguments::refuse(storage.problem);
  TensorInStorage tensor{storage, at::kFloat, call.get<std::int64_t>(1), call.integers(2),
                         call.integers(3)};
  if (storage.dtype.has_value()) {
    tensor.dtype = *storage.dtype;
  } else {
    const std::string& name = call.get<Global>(6).name;  // "torch.float8_e5m2"
    const auto dtype = dtype_named(kOtherDtypes, last_part(name));
    if (!dtype.has_value()) Arguments::refuse("the dtype " + name);
    tensor.dtype = *dtype;
  }
  // {"conj": True}: the values in the storage are not those of the tensor.
  const std::size_t view = storage.dtype.has_value() ? 6 : 7;
  if (call.size() > view) {
    const auto* bits = call.at(view).get<Dict>();
    if (bits != nullptr && !bits->items.empty())
      Arguments::refuse(
          "a view that conjugates or negates; save tensor.resolve_conj().resolve_neg()");
  }
  return tensor;
}

// collections.OrderedDict(), or with a list of keys and values.
Dict ordered_dict_of(const Arguments& call) {
  Dict dict;
  if (call.size() == 0) return dict;
  const auto& items = call.get<List>(0).items;
  call.count(items.size());
  for (const Value* item : items) {
    const auto* pair = item->get<List>();
    if (pair == nullptr || pair->items.size() != 2) Arguments::refuse("an item that is no pair");
    dict.items.emplace_back(pair->items[0], pair->items[1]);
  }
  return dict;
}

// What the call gives if its arguments are those that PyTorch writes.
decltype(Value::held) value_of(const std::string& function, const List& arguments, Copies& copies) {
  const Arguments call(arguments, &copies);
  if (function == "collections.OrderedDict") return ordered_dict_of(call);
  if (function == "collections.defaultdict") return Dict{};
  if (function == "torch._utils._rebuild_tensor" || function == "torch._utils._rebuild_tensor_v2" ||
      function == "torch._utils._rebuild_tensor_v3")
    return tensor_of(call);
  if (function == "torch._utils._rebuild_parameter" ||
      function == "torch._utils._rebuild_parameter_with_state") {
    if (const auto* object = call.at(0).get<Object>())
      Arguments::refuse(object->problem.empty() ? object->type : object->problem);
    const auto& tensor = call.get<TensorInStorage>(0);
    call.count(tensor.sizes.size() + tensor.strides.size());
    return tensor;
  }
  // What torch::pickle_save wraps dicts in, and TorchScript lists.
  if (function == "torch.jit._pickle.restore_type_tag" ||
      function == "torch.jit._pickle.build_tensorlist") {
    const Value& wrapped = call.at(0);
    if (const auto* dict = wrapped.get<Dict>()) call.count(dict->items.size());
    if (const auto* list = wrapped.get<List>()) call.count(list->items.size());
    if (wrapped.get<Dict>() != nullptr || wrapped.get<List>() != nullptr) return wrapped.held;
  }
  // A tensor with attributes: (function, class, arguments, attributes).
  if (function == "torch._tensor._rebuild_from_type_v2" && call.size() >= 3 &&
      call.get<Global>(0).name != function)
    return value_of(call.get<Global>(0).name, call.get<List>(2), copies);
  return Object{function, nullptr, ""};
}

Storage checked_storage_of(const Value& persistent_id) {
  const List none;
  const auto* parts = persistent_id.get<List>();
  const Arguments id(parts == nullptr ? none : *parts);
  if (id.get<std::string>(0) != "storage") Arguments::refuse("another kind of reference");
  Storage storage;
  storage.key = id.get<std::string>(2);
  if (storage.key.size() > kMaxKey) Arguments::refuse("a key of that length");
  storage.type = last_part(id.get<Global>(1).name);
  if (id.size() > 5 && id.at(5).get<None>() == nullptr)
    storage.problem = "a part of another storage";
  if (storage.type == "UntypedStorage") {
    storage.element_size = 1;
    return storage;
  }
  storage.dtype = dtype_named(kStorages, storage.type);
  if (!storage.dtype.has_value()) storage.dtype = dtype_named(kStoragesOfLibTorch, storage.type);
  if (storage.dtype.has_value()) storage.element_size = c10::elementSize(*storage.dtype);
  if (!storage.dtype.has_value() || c10::isQIntType(*storage.dtype))
    storage.problem = "a " + storage.type;
  return storage;
}

}  // namespace

decltype(Value::held) result_of(const std::string& function, const List& arguments,
                                Copies& copies) {
  try {
    return value_of(function, arguments, copies);
  } catch (const Problem& problem) {
    return Object{function, nullptr, problem.what()};
  }
}

Storage storage_of(const Value& persistent_id, const std::string& source) {
  try {
    return checked_storage_of(persistent_id);
  } catch (const Problem& problem) {
    throw FileError(kRead, "a storage as PyTorch saves it in " + source, problem.what(),
                    "save the model's state_dict() in Python with safetensors.torch.save_file");
  }
}

std::optional<std::string_view> storage_class_of(c10::ScalarType dtype) {
  return name_in(kStorages, dtype);
}

std::optional<std::string_view> other_dtype_name(c10::ScalarType dtype) {
  return name_in(kOtherDtypes, dtype);
}

}  // namespace semitone::weights
