#pragma once

#include <span>
#include <string_view>

// What parses bytes from outside: files, command lines, and lines that come over sockets. Each
// target gives one parser any bytes. The parser may accept them or throw its own exception; other
// exceptions, and what sanitizers find, are bugs.
//
// `make fuzz` generates inputs with libFuzzer; the test fuzz_corpus_test runs those in corpus/.
namespace semitone::fuzz {

void casts(std::string_view input);  // names of operators and dtypes in cast policies
// CIFAR-10 ('0'), CIFAR-100 ('1'), also gzipped, or names of classes ('2'): the first byte, modulo 3
void cifar(std::string_view input);
void code(std::string_view input);  // the classes of a checkpoint's archives
// The file of semitone train --config; with another flag on the command line if its size is odd.
void config(std::string_view input);
void flags(std::string_view input);        // the program's flags: one word a line
void idx(std::string_view input);          // data sets, also gzipped
void image(std::string_view input);        // PNG, JPEG, PPM and PGM images
void lines(std::string_view input);        // the lines of a connection
void manifest(std::string_view input);     // checkpoints' manifests
void messages(std::string_view input);     // lines of launchers
void pickle(std::string_view input);       // the pickle in a file of torch.save
void policy(std::string_view input);       // cast policies in files
void records(std::string_view input);      // the lines of a run's record, and its report
void rendezvous(std::string_view input);   // URLs, endpoints and ranks with streams
void safetensors(std::string_view input);  // the JSON header, and sizes that it states
void text(std::string_view input);         // texts, also gzipped
void values(std::string_view input);       // values of flags: policies, processes, nodes, intervals
void watch(std::string_view input);        // lines of ranks, and what they put into the store
void weights(std::string_view input);      // files of weights of any format
void zip(std::string_view input);          // the directory of a file of torch.save

struct Target {
  const char* name;
  void (*run)(std::string_view input);
};

// All of them, by name.
std::span<const Target> targets();

}  // namespace semitone::fuzz
