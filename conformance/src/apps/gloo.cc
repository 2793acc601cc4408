// Runs gloo's collectives over its ibverbs transport, and checks every result.
//
// Arguments: a directory that all processes share, the rank of this process, the number of
// processes, the device, and its GID index. Each collective runs twice with each of several
// lengths, because gloo keeps its connections and buffers in between. The process prints a line
// for each collective with correct results, and exits with 1 after the first wrong result.
#include <gloo/allgather_ring.h>
#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/barrier_all_to_one.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/pairwise_exchange.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/ibverbs/device.h>

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

using Words = std::vector<uint64_t>;
using Shared = std::shared_ptr<gloo::rendezvous::Context>;

static std::string folder;
static int own_rank, ranks;
static gloo::Algorithm *between;

// Algorithms and their memory are never freed: gloo aborts a process that destroys a buffer before
// its last Send is complete, and an algorithm does not wait for the completion.
template <typename Algorithm> static Algorithm &keep(Algorithm *algorithm)
{
	return *algorithm;
}

static void leave()
{
	fflush(nullptr);
	_exit(0);
}

// Exits when all ranks have called this function. The first process that exits closes its
// connections, which gloo treats as an error in the others.
[[noreturn]] static void end()
{
	std::set_terminate(leave);
	std::string begin = folder + "/end.";
	std::ofstream(begin + std::to_string(own_rank)) << "here";
	for (int rank = 0; rank < ranks; rank++)
		while (access((begin + std::to_string(rank)).c_str(), F_OK))
			usleep(1000);
	leave();
	abort();
}

// The initial word of a rank. Sums of these words reveal which ranks took part.
static uint64_t word(int rank, size_t at, int round)
{
	return (1ULL << (8 * rank)) + (static_cast<uint64_t>(at) << 40) +
		static_cast<uint64_t>(round) * 16;
}

static uint64_t sum(size_t at, int round)
{
	uint64_t all = 0;
	for (int rank = 0; rank < ranks; rank++)
		all += word(rank, at, round);
	return all;
}

static void expect(const char *name, size_t length, size_t at, uint64_t is, uint64_t wanted)
{
	if (is == wanted)
		return;
	fprintf(stderr, "%s of %zu words: word %zu is %llx instead of %llx\n", name, length, at,
		static_cast<unsigned long long>(is), static_cast<unsigned long long>(wanted));
	exit(1);
}

// Initializes the words of this rank again. All ranks wait for each other first, because some
// algorithms still read their words, or data of the last run, when other ranks are already
// finished. This happens over TCP, too.
static void fill(Words &words, int round)
{
	between->run();
	for (size_t at = 0; at < words.size(); at++)
		words[at] = word(own_rank, at, round);
}

// Numbers of words. None is below ten, as in gloo's own tests: with fewer words than ranks,
// `AllreduceBcube` sometimes returns wrong sums.
static const size_t lengths[] = { 10, 100, 4096, 100000 };

template <typename Algorithm> static void allreduce(const char *name, const Shared &context)
{
	for (size_t length : lengths) {
		Words &words = *new Words(length);
		Algorithm &algorithm =
			keep(new Algorithm(context, std::vector<uint64_t *>{ words.data() },
					   static_cast<int>(length)));
		for (int round = 0; round < 2; round++) {
			fill(words, round);
			algorithm.run();
			for (size_t at = 0; at < length; at++)
				expect(name, length, at, words[at], sum(at, round));
		}
	}
	printf("%s: correct\n", name);
}

static void allgather(const Shared &context)
{
	for (size_t length : lengths) {
		Words &mine = *new Words(length), &all = *new Words(length * ranks);
		auto &algorithm = keep(new gloo::AllgatherRing<uint64_t>(context, { mine.data() },
				all.data(),
									 static_cast<int>(length)));
		for (int round = 0; round < 2; round++) {
			fill(mine, round);
			algorithm.run();
			for (size_t at = 0; at < all.size(); at++)
				expect("allgather", length, at, all[at],
				       word(static_cast<int>(at / length), at % length, round));
		}
	}
	puts("allgather_ring: correct");
}

static void broadcast(const Shared &context)
{
	for (int root = 0; root < ranks; root++) {
		for (size_t length : lengths) {
			Words &words = *new Words(length);
			auto &algorithm = keep(
				new gloo::BroadcastOneToAll<uint64_t>(context, { words.data() },
						length, root));
			for (int round = 0; round < 2; round++) {
				fill(words, round);
				algorithm.run();
				for (size_t at = 0; at < length; at++)
					expect("broadcast", length, at, words[at],
					       word(root, at, round));
			}
		}
	}
	puts("broadcast_one_to_all: correct");
}

// Each rank in turn receives all sums. If every rank received a part of the sums, it would copy its
// part over words that it may still be sending: gloo waits neither for the completion nor for the
// peer, so the peer sometimes adds wrong words.
static void reduce_scatter(const Shared &context)
{
	for (int to = 0; to < ranks; to++) {
		for (size_t length : lengths) {
			Words &words = *new Words(length);
			std::vector<int> shares(ranks, 0);
			shares[to] = static_cast<int>(length);
			auto &algorithm = keep(new gloo::ReduceScatterHalvingDoubling<uint64_t>(
				context, { words.data() }, static_cast<int>(length), shares));
			for (int round = 0; round < 2; round++) {
				fill(words, round);
				algorithm.run();
				for (size_t at = 0; own_rank == to && at < length; at++)
					expect("reduce_scatter", length, at, words[at],
					       sum(at, round));
			}
		}
	}
	puts("reduce_scatter: correct");
}

// gloo does not expose the data of this collective, so this checks only that each exchange
// completes.
static void pairwise_exchange(const Shared &context)
{
	int destinations = 0;
	while (1 << destinations < ranks)
		destinations++;
	auto &algorithm = keep(new gloo::PairwiseExchange(context, destinations * 65536,
							  destinations));
	for (int round = 0; round < 20; round++)
		algorithm.run();
	puts("pairwise_exchange: correct");
}

// Each rank creates a file before the barrier. After it, the files of all ranks must exist.
static void barrier(const char *name, gloo::Algorithm &algorithm)
{
	for (int round = 0; round < 20; round++) {
		std::string begin = folder + "/" + name + "." + std::to_string(round) + ".";
		if (round % ranks == own_rank)
			usleep(20000);
		std::ofstream(begin + std::to_string(own_rank)) << "here";
		algorithm.run();
		for (int rank = 0; rank < ranks; rank++) {
			if (access((begin + std::to_string(rank)).c_str(), F_OK)) {
				fprintf(stderr, "%s: returned before rank %d entered it\n", name,
					rank);
				exit(1);
			}
		}
	}
	printf("%s: correct\n", name);
}

int main(int, char **argv)
{
	folder = argv[1];
	own_rank = atoi(argv[2]);
	ranks = atoi(argv[3]);
	gloo::transport::ibverbs::attr attr = { argv[4], 1, atoi(argv[5]) };
	auto device = gloo::transport::ibverbs::CreateDevice(attr);
	gloo::rendezvous::FileStore store(folder);
	auto context = std::make_shared<gloo::rendezvous::Context>(own_rank, ranks);
	context->connectFullMesh(store, device);

	between = new gloo::BarrierAllToAll(context);
	allreduce<gloo::AllreduceRing<uint64_t>>("allreduce_ring", context);
	allreduce<gloo::AllreduceRingChunked<uint64_t>>("allreduce_ring_chunked", context);
	allreduce<gloo::AllreduceHalvingDoubling<uint64_t>>("allreduce_halving_doubling", context);
	allreduce<gloo::AllreduceBcube<uint64_t>>("allreduce_bcube", context);
	allgather(context);
	broadcast(context);
	reduce_scatter(context);
	pairwise_exchange(context);
	barrier("barrier_all_to_all", keep(new gloo::BarrierAllToAll(context)));
	barrier("barrier_all_to_one", keep(new gloo::BarrierAllToOne(context)));
	puts("all: correct");
	end();
}
