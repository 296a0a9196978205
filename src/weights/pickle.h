// Reads Python's pickles without Python, and without executing anything: a pickle is a program for
// a stack machine, whose instructions can call any function of Python. Here a call gives a value
// only if it is one of those with which PyTorch describes tensors; all others give an Object, which
// says what would have been called.

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace semitone::weights {

struct Value;

struct None {};
// An integer that does not fit into 64 bits.
struct LongInteger {};
// A tuple, a list or a set.
struct List {
  std::vector<Value*> items;
};
struct Dict {
  std::vector<std::pair<Value*, Value*>> items;
  // The value of a key that is this text, or an integer that is written so; null if there is none.
  // The last counts, as in Python.
  const Value* find(std::string_view key) const;
};
// The remedy where a pickle has more than its limits.
inline constexpr auto kSaveAlone =
    "save the state_dict alone in Python, with safetensors.torch.save_file";

// A class or function by name: "torch.FloatStorage".
struct Global {
  std::string name;
};
// What a call of a class or function would have given.
struct Object {
  std::string type;
  Value* state = nullptr;  // null if it was given none
  std::string problem;     // why it is no tensor or dict, if the call should have given one
};
// Memory of tensors. Its bytes are outside the pickle, under the key.
struct Storage {
  std::string key;
  std::string type;                      // its class, "FloatStorage"
  std::optional<c10::ScalarType> dtype;  // nothing for bytes without a dtype, and for other classes
  std::size_t element_size = 0;          // 0 for classes that are not known
  std::string problem;                   // why no tensor can be made of it
};
struct TensorInStorage {
  Storage storage;
  c10::ScalarType dtype;
  std::int64_t offset;  // this and the strides in elements
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
};

struct Value {
  std::variant<None, bool, std::int64_t, double, std::string, LongInteger, List, Dict, Global,
               Object, Storage, TensorInStorage>
      held;

  template <typename T>
  const T* get() const {
    return std::get_if<T>(&held);
  }
  template <typename T>
  T* get() {
    return std::get_if<T>(&held);
  }
};

// Pickles one after the other in a text. Their values live as long as this object.
class PickleReader {
 public:
  // @param source  what is read, for messages: "'model.pt'"
  PickleReader(std::string_view text, std::string source)
      : text_(text), source_(std::move(source)) {}

  // Reads the next pickle. FileError if the text ends within it, if it is no pickle of protocol 2
  // or later, or if it has more values than kMaxValues.
  const Value& read();

  // All storages that the pickles read so far name, in their order; some several times.
  const std::vector<const Storage*>& storages() const { return storages_; }

  // Where the next one would begin.
  std::size_t position() const { return position_; }

  // More than any list of weights has. A value takes some hundred bytes, and one byte in the text.
  static constexpr std::size_t kMaxValues = 4'000'000;

 private:
  friend class PickleMachine;
  std::string_view text_;
  std::string source_;
  std::size_t position_ = 0;
  std::deque<Value> values_;
  std::size_t copied_ = 0;  // items and numbers that calls copied
  std::vector<const Storage*> storages_;
};

}  // namespace semitone::weights
