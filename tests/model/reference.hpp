// A second decoder of each family, from its published equations: plain loops in double, without torch, cache or
// batching.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "model/config.hpp"

namespace echoline::model::reference {

// Row-major weights by checkpoint name.
using Weights = std::map<std::string, std::vector<double>>;

// Experts to use in a mixture of experts, by token and mixture layer; an empty list: those with the highest scores.
using GivenExperts = std::vector<std::vector<std::vector<std::size_t>>>;

// Logits [tokens][vocab] of one sequence.
std::vector<std::vector<double>> logits(const ModelConfig& config, const Weights& weights,
                                        const std::vector<Token>& tokens, const GivenExperts& given = {});

std::vector<double> log_softmax(const std::vector<double>& logits, double temperature);

}  // namespace echoline::model::reference
