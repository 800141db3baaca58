"""Do the tests notice when a line that matters is wrong? One mutation at a time, in a copy of the checkout.

    python tests/mutants.py                      # all of them; a few seconds each
    python tests/mutants.py mask walk            # those whose names hold one of these
    python tests/mutants.py --list

Each mutation names the tests that are to fail: few, so that a run says which test guards the line. They run with -x in
a process of their own; `--control` first runs them all on the unchanged copy. Prints a table, and ends with 1 where a
mutant has survived or its tests could not be run. Beside the tests that run by themselves: tests/test_mutants.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache")
PATIENCE = 120  # seconds; a mutant that makes a loop endless counts as killed
FAILED, HANGS = 1, 124  # what pytest and `run_tests` return


@dataclass(frozen=True)
class Mutant:
    """name: what is wrong with it. path: below lade/. old: occurs once in the file. tests: of which at least one is to
    fail."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def mutant(name: str, path: str, old: str, new: str, *tests: str) -> Mutant:
    """tests: "file::test", with neither the folder nor "test_" before the file's name."""
    return Mutant(name, path, old, new, tuple(f"tests/test_{test}" for test in tests))


MUTANTS = [
    # Masks and layout.
    mutant("mask: a window cell sees one level too few", "block/layout.py",
           "own_column = (level > 0) & (level <= level_q)", "own_column = (level > 0) & (level < level_q)",
           "layout.py::test_layout_is_the_definition"),
    mutant("mask: a tree node sees its parent alone", "block/token_tree.py",
           "row[node] |= row[parent + 1]", "row[node, parent + 1] = True",
           "token_tree.py"),
    mutant("mask: a sliding window one token too wide", "block/mask.py",
           "block.offsets - self.window + 1", "block.offsets - self.window",
           "layout.py::test_mask_over_slots"),
    mutant("mask: a prompt's padding is seen", "block/mask.py",
           "is_prefix[:, : block.key_mask.shape[1]] &= block.key_mask", "is_prefix[:, : block.key_mask.shape[1]] &= True",
           "layout.py::test_mask_over_slots", "contract.py::test_ragged_greedy_batches"),
    mutant("mask: packed words lose a key", "forward/cuda/kernel/packed_mask.py",
           "bits[:, :, :num_queries] = visible", "bits[:, :, : num_queries - 1] = visible[..., :-1]",
           "kernels.py::test_mask_round_trip"),
    mutant("padding: rows of padded nodes are kept", "block/layout.py",
           "logits[:, : 1 + tree.num_nodes], logits[:, 1 + self.num_nodes :]",
           "logits[:, : 1 + tree.num_nodes], logits[:, 1 + tree.num_nodes :]",
           "static_shapes.py::test_trees_of_several_sizes"),
    # The walk, and what ends a text.
    mutant("walk: a guess is taken though the text has ended", "verification/walk.py",
           "if commit(tokens, were_guessed) or not were_guessed:", "if commit(tokens, were_guessed) and not were_guessed:",
           "walk.py::test_walk_ends_with_the_text"),
    mutant("walk: a batch goes on where one row missed", "verification/walk.py",
           "were_guessed = len(nodes) == len(children)", "were_guessed = bool(nodes)",
           "walk.py::test_rows_walk_together", "contract.py::test_batched_streams_and_sequences", "contract.py::test_dictionary_outputs",
           "contract.py::test_batch"),
    mutant("stop: one token too many", "verification/selection.py",
           "or length >= self.max_length",
           "or length > self.max_length",
           "exactness.py::test_length_cuts_inside_accepted_guesses"),
    mutant("stop: an end of sequence inside a run", "verification/selection.py",
           "tokens[0] in self.eos_ids\n            or length", "False\n            or length",
           "exactness.py::test_end_of_sequence_inside_accepted_guesses"),
    mutant("stop: stop strings are not looked for", "verification/selection.py",
           "or any(bool(criterion(self.sequences.texts(rows), None)) for criterion in self.stop_strings)", "or False",
           "contract.py::test_stop_strings_end_each_row_by_itself"),
    # Draws.
    mutant("draws: each row draws for itself", "verification/draws.py",
           "if index not in self._draws:", "if True:",
           "draws.py::test_the_draws_are_those_of_multinomial"),
    mutant("draws: another thread's are taken back", "verification/draws.py",
           "            with drawing:\n", "            if True:\n",
           "draws.py::test_what_another_thread_draws_is_not_taken_back"),
    mutant("draws: nothing is forgotten", "verification/draws.py",
           "if number >= index}", "if number >= 0}",
           "draws.py::test_draws_that_nobody_will_ask_for_are_dropped"),
    # The cache.
    mutant("cache: accepted keys move one slot too low", "block/kv_cache.py",
           "self.write(row, start + 1, self.read(row, path))", "self.write(row, start, self.read(row, path))",
           "kv_cache.py::test_blocks_and_compaction"),
    mutant("cache: rows of different lengths share their slots", "block/kv_cache.py",
           "if min(self.lengths) != max(self.lengths):", "if False:",
           "kv_cache.py::test_blocks_and_compaction", "contract.py::test_ragged_greedy_batches"),
    mutant("cache: growing loses what was there", "block/kv_cache.py",
           "data[:, :, :, :old] = self.data", "data[:, :, :, : old - 1] = self.data[:, :, :, :-1]",
           "kv_cache.py::test_growth_keeps_what_is_committed"),
    mutant("cache: an earlier call's values stay", "forward/cuda/buffer_pool.py",
           "storage.data.zero_()", "storage.data.nan_to_num_(0.0, 0.0, 0.0) if False else None",
           "static_shapes.py::test_what_a_call_leaves_in_a_cache_is_gone"),
    # Values that are no numbers.
    mutant("NaN: logits that a guess made NaN are believed", "verification/nan_guard.py",
           "        return is_fine", "        return True",
           "nan_guard.py::test_a_guess_that_is_no_number"),
    mutant("NaN: the slots keep the guess", "verification/nan_guard.py",
           "part[row, :, length:] = 0", "pass",
           "nan_guard.py::test_a_guess_that_is_no_number"),
    # Verdicts, hooks, refusals.
    mutant("verdict: a wrong trial passes", "models/self_check.py",
           "is_fine = all(error * ratio < effect for error, effect in found)", "is_fine = True",
           "models.py::test_an_unknown_family_is_tried_out", "foreign.py::test_a_hook_that_goes_by_position"),
    mutant("verdict: missing memory is remembered as one", "common/trial.py",
           "if not is_out_of_memory(error):", "if True:",
           "foreign.py::test_missing_memory_is_no_verdict"),
    mutant("hooks: nobody is asked for leave", "models/foreign.py",
           'reason=next(iter(reasons), None)', 'reason=None',
           "foreign.py::test_an_allowed_hook_is_tried_out", "foreign.py::test_wherever_hooks_are_put_on"),
    mutant("hooks: a mode of the user's", "models/foreign.py",
           "for mode in modes if not is_written_by(AUTHORS, mode)]", "for mode in modes if mode is None]",
           "packed.py::test_modes_of_the_user_see_no_guess"),
    mutant("foreign modules: a gate that opens later", "models/foreign.py",
           "classes.append((place, *key, *_settings_of(part)))", "classes.append((place, *key))",
           "left_state.py::test_foreign_modules_that_are_switched_on_later"),
    mutant("requests: an unknown argument of the model", "models/eligibility.py",
           "if name not in known and value is not None)", "if name not in known and value is ...)",
           "requests.py"),
    mutant("requests: a boundary one token late", "models/phi3.py",
           "if length <= boundary < request.max_length - 1:", "if length <= boundary < request.max_length - 2:",
           "models.py::test_phi3_up_to_its_boundary"),
    mutant("hooks: a mode of torch is not seen", "models/foreign.py",
           "is_hooked=bool(modes) or not all(", "is_hooked=not all(",
           "packed.py::test_modes_of_torch_see_each_product"),
    mutant("packed weights: half of what is free, in each call", "forward/cpu/packed.py",
           "(free + held) * share - held", "free * share",
           "packed.py::test_what_does_not_fit_is_not_packed"),
    mutant("patch: an original is not put back", "augment.py",
           "                setattr(_owner(name), name, function)\n", "                pass\n",
           "augment.py::test_restored_by_identity"),
    # Costs and sizes of blocks.
    mutant("costs: seconds in place of plain steps", "preparation.py",
           "ratios[size].append(seconds / plain)", "ratios[size].append(seconds)",
           "step_costs.py::test_a_warm_up_stores_what_steps_cost"),
    mutant("costs: tokens that wait cost nothing", "drafting/step_costs.py",
           "num_tokens + self._num_waiting", "num_tokens",
           "step_costs.py::test_kinds_and_batches_have_tables_of_their_own"),
    mutant("costs: a stored table is replaced", "common/cache_folder.py",
           'if name in content["tables"]:', "if False:",
           "step_costs.py::test_a_stored_table_is_found"),
    mutant("costs: the worst rate wins", "drafting/block_policy.py",
           "size, *_ = max(compared", "size, *_ = min(compared",
           "block_policy.py::test_the_best_rate_wins"),
    # What guesses come from.
    mutant("memory: a table grows beyond its bound", "drafting/top_k_table.py",
           "elif len(slots) < self.capacity:", "elif len(slots) <= self.capacity:",
           "memory.py::test_a_full_table_drops_what_was_written_longest_ago"),
    mutant("memory: an n-gram that newer ones evict in the same call stays", "drafting/ngram_pool.py",
           "(after.sum(1) < self.num_guesses)", "(after.sum(1) <= self.num_guesses)",
           "ngram_pool.py"),
    mutant("memory: a file of another model is taken", "drafting/memory.py",
           "if mine[name] != other[name]:", "if False:",
           "memory.py::test_a_file_of_another_model_is_refused"),
    mutant("contexts: a guess counts as more similar than the row that led to it", "drafting/growth.py",
           "similarity = min(found.similarity, highest)", "similarity = found.similarity",
           "contexts.py::test_guesses_of_similar_contexts"),
    mutant("contexts: a text goes on with that of its root", "drafting/tree.py",
           "None if after is None else after[accepted[-1]]", "None if after is None else after[0]",
           "contexts.py::test_the_context_of_each_row_is_the_one_after_its_last_token"),
    mutant("contexts: rows that were overwritten are found", "drafting/contexts.py",
           "del self._places[token][0]", "self._places[token] = self._places[token][0:]",
           "contexts.py::test_the_most_similar_row_of_a_token_is_found"),
    mutant("contexts: all rows of a token are compared", "drafting/contexts.py",
           "self._places.get(token, ())[-MAX_PLACES:]", "self._places.get(token, ())",
           "contexts.py::test_the_latest_rows_of_a_token_are_compared"),
    mutant("contexts: a file lists the tokens of a text in order", "drafting/contexts.py",
           "np.lexsort((tokens[by_age], np.arange(len(tokens)) // SAVED_TOGETHER))", "np.arange(len(tokens))",
           "contexts.py::test_a_file_does_not_spell_out_the_texts"),
    mutant("trees: a row's guesses are all as likely as its first", "drafting/growth.py",
           "prior.by_bin[both & _BIN]", "prior.by_bin[row[0] & _BIN]",
           "growth.py::test_trees_are_the_likeliest_of_their_size"),
    mutant("ids without an embedding are guesses", "drafting/tree.py",
           "logits = logits[..., : self.num_tokens]", "pass",
           "drafting.py::test_ids_without_an_embedding_are_no_guesses"),
    mutant("a prediction is looked for in the prompt as well", "drafting/text.py",
           "self.tokens[max(self._prompt_length, len(self.tokens) - MAX_MATCH) :]", "self.tokens[-MAX_MATCH:]",
           "prediction.py::test_the_first_guess_is_the_beginning"),
    mutant("predictions: the first prompt's for all rows", "drafting/prediction.py",
           "if len(found) == 1 else", "if found else", "prediction.py"),
    mutant("predictions: any id", "drafting/prediction.py",
           "if token >= num_tokens]", "if token > num_tokens]", "prediction.py::test_what_does_not_fit_the_call"),
    # Several processes.
    mutant("parallel: an answer in its neighbour's place", "parallel/group.py",
           "table[row, 1 + node] = token", "table[row, node] = token",
           "parallel.py::test_same_tokens_on_all_ranks[2-True]"),
    mutant("parallel: a path is torn", "parallel/partition.py",
           "parts[rank].update(path)", "parts[rank].add(path[-1])",
           "partition.py"),
    # Models with a recurrent state.
    mutant("recurrent: states are never put back", "models/recurrent_state.py",
           "                states[name] = copy", "                pass",
           "recurrent.py::test_wrong_and_right_guesses"),
    mutant("recurrent: states are copied after the block, not before it", "models/recurrent_state.py",
           "(states, name, state.clone())", "(states, name, state)",
           "recurrent.py::test_wrong_and_right_guesses"),
    mutant("recurrent: a waiting token is dropped", "models/recurrent_state.py",
           "self._tokens[:, :num_done] if num_done", "self._tokens[:, : num_done - 1] if num_done",
           "recurrent.py::test_wrong_and_right_guesses"),
    mutant("recurrent: waiting tokens are one position late", "models/recurrent_state.py",
           "block.positions[..., :1] + before", "block.positions[..., :1] + before + 1",
           "recurrent.py::test_wrong_and_right_guesses"),
    mutant("recurrent: waiting tokens take slots of their own", "block/kv_cache.py",
           "return max(self.lengths) - self.num_waiting", "return max(self.lengths)",
           "recurrent.py::test_wrong_and_right_guesses"),
    mutant("recurrent: ever more tokens wait", "decoding.py",
           "self.nan_guard.has_tripped or self.cache.num_waiting >= MAX_WAITING", "self.nan_guard.has_tripped",
           "recurrent.py::test_wrong_and_right_guesses"),
    mutant("recurrent: rows of a batch have lengths of their own", "models/chains.py",
           "needs_equal_lengths = True", "needs_equal_lengths = False",
           "recurrent.py::test_batches_go_in_step"),
    mutant("recurrent: a returned cache lacks what waits", "decoding.py",
           "            self.run_waiting()", "            pass",
           "recurrent.py::test_returned_caches"),
    mutant("recurrent: a returned cache has the states of the prompt", "models/recurrent_state.py",
           "        copy_states(self, cache)", "        pass",
           "recurrent.py::test_returned_caches"),
    mutant("recurrent: a caller's states are not taken", "models/recurrent_state.py",
           "        copy_states(cache, self)", "        pass",
           "recurrent.py::test_returned_caches"),
    mutant("recurrent: the index of keys keeps rejected guesses", "models/recurrent_state.py",
           "self._copies += [(vars(layer), name, keys) for", "[(vars(layer), name, keys) for",
           "recurrent.py::test_returned_caches"),
    mutant("recurrent: a returned cache has no index", "models/recurrent_state.py",
           "if getattr(mine, INDEX[0], None) is not None:", "if False:",
           "recurrent.py::test_returned_caches"),
    mutant("recurrent: an indexed layer's length lacks the block", "models/recurrent_state.py",
           "if self.indexer_keys is None else self.indexer_keys.shape[1]", "",
           "families.py::test_composite[glm5_next-text]"),
    mutant("recurrent: blocks go through the scan of several tokens", "models/chains.py",
           "if not scans:", "if True:",
           "recurrent.py::test_the_self_check"),
    mutant("recurrent: blocks limit time steps", "models/chains.py",
           "return any(map(has_limit, self.parts))", "return False",
           "recurrent.py::test_returned_caches"),
    mutant("recurrent: another state passes the self-check", "common/tolerance.py",
           "STATE_EFFECT_RATIO = {torch.float64: 1e5,", "STATE_EFFECT_RATIO = {torch.float64: 1e2,",
           "recurrent.py::test_states_that_blocks_leave_otherwise"),
    # Graphs and steps on the device.
    mutant("graphs: new weights are not noticed", "forward/cuda/fingerprint.py",
           "chain(model.parameters(), model.buffers())]", "()]",
           "static_shapes.py::test_captured_anew_where_a_graph_would_not_notice"),
    mutant("graphs: short calls never capture", "forward/cuda/static_shapes.py",
           "num_asked = trials.num_asked[num_rows]", "pass",
           "automatic.py::test_short_calls_capture_once_they_have_asked_for_enough"),
    mutant("graphs: a deterministic call depends on others", "forward/cuda/static_shapes.py",
           "if not config.deterministic:  # with", "if True:  # with",
           "automatic.py::test_short_calls_capture_once_they_have_asked_for_enough"),
    mutant("graphs: the block of the capture stays", "forward/cuda/static_inputs.py",
           "        self._step.fill(step_inputs(block, cache, *others))", "        pass",
           "static_shapes.py::test_captured_once_for_all_calls"),
    # How blocks run on a CPU.
    mutant("grouped attention: prompts without a mask are not causal", "forward/cpu/grouped_attention.py",
           "or attention_mask is None", "or False",
           "grouped_attention.py::test_what_it_is_not_for_is_left_to_transformers"),
    mutant("grouped attention: also where torch rounds otherwise", "forward/cpu/grouped_attention.py",
           "is_sdpa and has_same_bits(adapter.dtype)", "is_sdpa",
           "grouped_attention.py::test_other_models_keep_their_attention"),
    mutant("grouped attention: also in place of eager", "forward/cpu/grouped_attention.py",
           "is_sdpa and has_same_bits(adapter.dtype)", "has_same_bits(adapter.dtype)",
           "grouped_attention.py::test_other_models_keep_their_attention"),
    mutant("packed weights: writes through .data go unnoticed", "forward/cpu/packed.py",
           "and torch.equal(checksums(weight), self.checksums)", "and self.checksums is not None",
           "packed.py::test_changed_weights_are_packed_anew"),
    mutant("packed weights: other bits are taken in half precision", "forward/cpu/packed.py",
           "return torch.equal(found.view(torch.int16), expected.view(torch.int16))", "return True",
           "packed.py::test_products_that_differ_are_not_used"),
    mutant("processor: bfloat16 needs no instructions", "common/processor.py",
           "(dtype == torch.bfloat16 and _has(\"avx512_bf16\"))", "dtype == torch.bfloat16",
           "step_costs.py::test_what_is_assumed_of_the_processor"),
    mutant("step costs: packed weights cost what torch's own do", "drafting/step_costs.py",
           'layout = FP16 if is_fp16 else "packed" if "packed" in kind else own', "layout = FP16 if is_fp16 else own",
           "step_costs.py::test_what_is_assumed_of_the_processor"),
    mutant("packed weights: bfloat16 without instructions for it", "forward/cpu/packed.py",
           "if dtype == torch.bfloat16 and not has_fast_products(dtype):", "if False:",
           "packed.py::test_processors_that_pack_no_bfloat16"),
    mutant("packed weights: bfloat16 with AMX", "common/processor.py",
           'and _has("amx_tile")', "", "packed.py::test_where_packing_gains_nothing"),
    mutant("packed weights: float32 on many threads", "common/processor.py",
           "and torch.get_num_threads() >= MANY_THREADS", "", "packed.py::test_where_packing_gains_nothing"),
    mutant("step costs: MKL costs on Intel's what it costs on AMD's", "drafting/step_costs.py",
           "if is_float32 and has_fast_mkl() else", "if False else",
           "step_costs.py::test_what_is_assumed_of_the_processor"),
    mutant("packed weights: bits that float16 does not have are dropped", "forward/cpu/fp16_weights.py",
           "(rows.view(torch.int32) & MORE_BITS).max()", "False",
           "fp16_weights.py::test_what_float16_does_not_hold"),
    mutant("packed weights: a weight's state is noted after packing", "forward/cpu/packed.py",
           "        if fp16 is not None:", "        self.note(weight)\n        if fp16 is not None:",
           "fp16_weights.py::test_a_weight_that_is_written_while_it_is_packed"),
    mutant("packed weights: small rows are rounded", "forward/cpu/fp16_weights.py",
           "return scaled if torch.equal(small.half().float(), small) else None", "return scaled",
           "fp16_weights.py::test_small_elements_beside_a_large_one"),
    mutant("packed weights: a long prompt does not pay for them", "forward/cpu/packed.py",
           " or self._num_prompt >= self._least_prompt", "",
           "fp16_weights.py::test_packed_when_calls_pay_for_it"),
    mutant("packed weights: prompts that there were count for nothing", "forward/cpu/packed.py",
           "shared.num_tokens += num_generated + self._num_prompt", "shared.num_tokens += num_generated",
           "fp16_weights.py::test_packed_when_calls_pay_for_it"),
    mutant("packed weights: cached tokens of a prompt count", "decoding.py",
           "batch_size * request.num_uncached", "batch_size * request.prompt_length",
           "fp16_weights.py::test_short_answers_to_long_prompts"),
    mutant("packed weights: prompts in float32 without them", "forward/cpu/packed.py",
           "(self.packs_prompts or has_slow_mkl())", "self.packs_prompts", "fp16_weights.py::test_prompts"),
    mutant("packed weights: prompts in float32 on every processor", "common/processor.py",
           'is_available() and "AMD" in', 'is_available() or "AMD" in', "packed.py::test_where_packing_gains_nothing"),
    mutant("packed weights: prompts in float32 of any length", "forward/cpu/packed.py",
           "not packing.packs_prompts and num_rows > MOST_FP32_ROWS", "False", "fp16_weights.py::test_prompts"),
    mutant("packed weights: only some in 16 bits", "forward/cpu/packed.py",
           "if missing > room and self.packs_prompts:", "if False:",
           "fp16_weights.py::test_all_weights_or_none_in_16_bits"),
    mutant("packed weights: a deterministic text depends on earlier calls", "forward/cpu/packed.py",
           "elif is_fixed and packs_prompts(adapter)", "elif False and packs_prompts(adapter)",
           "fp16_weights.py::test_deterministic_texts_do_not_depend_on_earlier_calls"),
    mutant("packed weights: some are used before all are made", "forward/cpu/packed.py",
           "elif self.packs_prompts:", "elif False:",
           "fp16_weights.py::test_packed_within_a_long_answer"),
    mutant("packed weights: the steps that pack depend on the free memory", "forward/cpu/packed.py",
           "most_bytes -= weight.nbytes", "most_bytes -= weight.nbytes if copy else 0",
           "packed.py::test_packing_waits_for_the_first_tokens_and_takes_several_steps"),
    mutant("packed weights: more memory is taken than is free", "forward/cpu/packed.py",
           "weight.nbytes <= room\n", "weight.nbytes <= 2 * room + 1\n",
           "packed.py::test_what_does_not_fit_is_not_packed"),
    mutant("trial: a difference is no reason", "common/trial.py",
           "            self.reasons[kind] = problem\n        return problem", "            pass\n        return None",
           "forward_paths.py::test_a_difference_is_remembered"),
    # What a call leaves, sees and goes past.
    mutant("state: blocks have rotary frequencies of their own", "models/shadow.py",
           "if is_moving_rope(module):", "if False:",
           "left_state.py::test_ropes"),
    mutant("state: a self-check leaves what it changed", "models/self_check.py",
           "with keeping_generators(adapter.model), keeping_state(adapter.model):",
           "with keeping_generators(adapter.model):",
           "left_state.py::test_a_self_check_moves_no_frequencies"),
    mutant("self-check: a module that keeps guesses is served", "models/self_check.py",
           "if not state.is_of(part):", "if False:",
           "left_state.py::test_foreign_modules_that_keep_something"),
    mutant("ends: any other number than 0 ends a text", "verification/selection.py",
           "self._unfinished & ~self.criteria(ids, scores)", "self._unfinished & ~(self.criteria(ids, scores) != 0)",
           "requests.py::test_answers_of_a_criterion"),
    mutant("state: containers inside of containers are left as they are", "common/state.py",
           "left.extend(value.values() if isinstance(value, dict) else value)", "pass",
           "left_state.py::test_own_forwards_leave_nothing"),
    mutant("cache: a caller's keys in a narrower dtype stay in it", "block/kv_cache.py",
           "            cache.promote(key_states.dtype)\n", "", "contract.py::test_a_cache_in_a_narrower_dtype"),
    mutant("cache: a mask may be shorter than the text", "models/eligibility.py",
           "if mask is not None and mask.shape[1] <", "if False and mask.shape[1] <",
           "contract.py::test_a_cache_that_holds_the_whole_prompt"),
    mutant("texts: user code is given lade's own buffer", "verification/sequences.py",
           "return torch.cat(self._whole(rows))", "return self._whole(rows)[0]",
           "contract.py::test_ids_that_user_code_keeps_are_its_own"),
    mutant("state: a trial takes merged adapters out of the weights twice", "common/state.py",
           "if not is_same or self._merged != _merged_adapters(own):", "if not is_same:",
           "adapters.py::test_merged_adapters_that_are_disabled"),
    mutant("adapters: merged ones that are disabled count as plain", "models/foreign.py",
           "return not has_variant and not (layer.merged and layer.disable_adapters)", "return not has_variant",
           "adapters.py::test_merged_adapters_that_are_disabled"),
    mutant("adapters: replaced methods are not seen", "models/foreign.py",
           "methods = () if base is PreTrainedModel or issubclass(kind, GenerationMixin) else vars(base).values()",
           "methods = ()",
           "adapters.py::test_other_adapters_are_not", "reasons.py::test_a_method_other_than_forward"),
    mutant("selection: a text that was written to is not read back", "verification/selection.py",
           "if not is_same:", "if False:",
           "requests.py::test_a_text_that_is_written_to"),
    mutant("selection: a guess is kept where a criterion wrote another token", "verification/selection.py",
           "return all(ended) or [text[-1] for text in self.sequences.generated[rows]] != tokens", "return all(ended)",
           "requests.py::test_a_text_that_is_written_to"),
    mutant("bypassed: a wrapper passes for what it wraps", "common/bypassed.py",
           "if not (is_there and module.partition(\".\")[0] in DECORATORS):", "if False:",
           "bypassed.py::test_each_function_on_the_list"),
    mutant("training: random numbers do not count", "models/training.py",
           "    if is_random:", "    if False:",
           "training.py::test_active_dropout_falls_back"),
]  # fmt: skip


def copy_of(root: Path, folder: Path) -> Path:
    """A copy of the checkout to be changed."""
    copy, checkpoints = folder / "copy", root / "models"

    def left_out(path: str, names: list[str]) -> set[str]:
        return LEFT_OUT(path, names) | ({checkpoints.name} if Path(path) == root else set())

    shutil.copytree(root, copy, ignore=left_out)
    if checkpoints.exists():
        (copy / checkpoints.name).symlink_to(checkpoints)
    return copy


def run_tests(copy: Path, tests: list[str]) -> tuple[int, str]:
    """pytest's exit status and what it printed."""
    # No bytecode: a changed file of the same size, written in the same second, would look unchanged.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return HANGS, "it took too long"
    return done.returncode, done.stdout + done.stderr


def outcome(copy: Path, wrong: Mutant) -> str:
    """ "killed", "survived", or why nothing can be said."""
    path = copy / "lade" / wrong.path
    original = path.read_text(encoding="utf-8")
    if original.count(wrong.old) != 1:
        return f"ERROR: lade/{wrong.path} holds the line {original.count(wrong.old)} times"
    try:
        path.write_text(original.replace(wrong.old, wrong.new), encoding="utf-8")
        status, printed = run_tests(copy, list(wrong.tests))
    finally:
        path.write_text(original, encoding="utf-8")
    if status in (FAILED, HANGS):
        return "killed"
    return "survived" if status == 0 else f"ERROR: pytest ended with {status}: {printed.strip()[-300:]}"


def chosen(names: list[str]) -> list[Mutant]:
    return [found for found in MUTANTS if not names or any(name in found.name for name in names)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of those to run")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--control", action="store_true", help="the tests have to pass on the unchanged copy first")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args(arguments)
    wrong_ones = chosen(options.names)
    if options.list:
        for wrong in wrong_ones:
            print(f"{wrong.name}: {', '.join(wrong.tests)}")
        return 0
    if not wrong_ones:
        parser.error(f"no mutant is called anything like {options.names}")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of(options.root, Path(folder))
        if options.control:
            status, printed = run_tests(copy, sorted({test for wrong in wrong_ones for test in wrong.tests}))
            if status:
                print(printed)
                print("the tests fail without a mutant")
                return 1
        print("| mutant | file | result | s |\n|---|---|---|--:|", flush=True)
        for wrong in wrong_ones:
            began = time.monotonic()
            results.append(outcome(copy, wrong))
            seconds = time.monotonic() - began
            print(f"| {wrong.name} | {wrong.path} | {results[-1]} | {seconds:.0f} |", flush=True)
    print(f"{results.count('killed')} of {len(results)} killed")
    return int(results.count("killed") < len(results))


if __name__ == "__main__":
    sys.exit(main())
