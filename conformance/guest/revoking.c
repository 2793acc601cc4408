/* Deregisters memory while a peer writes into it or sends from it, and overflows completion queues.
 *
 * revoking ADDR PORT ROUNDS
 *
 * In each round, one queue pair of this process continuously writes into memory of another one.
 * Then the target or the source of the Writes is deregistered, or completions are no longer polled.
 * The connection must end with an error, and no octet of a deregistered target may change after the
 * call. Exit status: 0 if all checks pass.
 */
#include "pair.h"

#define WRITES 32
#define OCTETS (64 * 1024)

enum what { TARGET, SOURCE, OVERFLOW, VARIANTS };
static const char *const descriptions[VARIANTS] = { "the target is deregistered",
					  "the source is deregistered",
						  "completions are not polled" };

static struct sockaddr_in address;
static unsigned char from[OCTETS], to[WRITES * OCTETS], copy[WRITES * OCTETS];

static struct ibv_cq *writer_cq, *target_cq;

/* `entries` is the size of the writer's completion queue. */
static struct pair connect_pair(int entries)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { WRITES, 4, 1, 1, 0 },
					 .sq_sig_all = 1 };
	struct ibv_qp_init_attr theirs = attr;
	struct pair pair = begin_pair(&address);

	writer_cq = ibv_create_cq(pair.writer->verbs, entries, NULL, NULL, 0);
	target_cq = ibv_create_cq(pair.writer->verbs, 16, NULL, NULL, 0);
	fail_if(!writer_cq || !target_cq, "a completion queue");
	attr.send_cq = attr.recv_cq = writer_cq;
	theirs.send_cq = theirs.recv_cq = target_cq;
	join_pair(&pair, attr, theirs);
	return pair;
}

static void destroy(struct pair *pair)
{
	destroy_queue_pairs(pair);
	fail_if(ibv_destroy_cq(writer_cq) || ibv_destroy_cq(target_cq),
		"destroying the completion queues");
	destroy_pair(pair);
}

/* Posts the Write number `turn`, to the next of WRITES offsets. Returns 0 if the post fails.
 */
static int post(struct pair *pair, unsigned turn, uint32_t lkey, uint32_t rkey)
{
	struct ibv_sge sge = { (uintptr_t)from, OCTETS, lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE },
		*bad;

	wr.wr.rdma.remote_addr = (uintptr_t)to + (size_t)(turn % WRITES) * OCTETS;
	wr.wr.rdma.rkey = rkey;
	return !ibv_post_send(pair->writer->qp, &wr, &bad);
}

/* Writes until a completion has an error, and returns its status. Returns 0 after `turns` Writes or
 * ten seconds without a completion. */
static enum ibv_wc_status write_repeatedly(struct pair *pair, unsigned turns, uint32_t lkey,
	uint32_t rkey,
				   unsigned *posted)
{
	struct ibv_wc wc;

	for (unsigned done = 0, idle = 0; done < turns && idle < 100000;) {
		while (*posted < WRITES && post(pair, done + *posted, lkey, rkey))
			++*posted;
		if (ibv_poll_cq(writer_cq, 1, &wc) == 1) {
			if (wc.status)
				return wc.status;
			--*posted;
			done++;
			idle = 0;
		} else {
			usleep(100);
			idle++;
		}
	}
	return 0;
}

static int state_of(struct rdma_cm_id *id)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	fail_if(ibv_query_qp(id->qp, &attr, IBV_QP_STATE, &init), "the state");
	return (int)attr.qp_state;
}

static void run_round(enum what what, unsigned round)
{
	struct pair pair = connect_pair(what == OVERFLOW ? 4 : 2 * WRITES);
	struct ibv_mr *source = ibv_reg_mr(pair.writer->pd, from, sizeof from,
					   IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mr *target = ibv_reg_mr(pair.target->pd, to, sizeof to, IBV_ACCESS_LOCAL_WRITE |
					   IBV_ACCESS_REMOTE_WRITE);
	uint32_t lkey, rkey;
	unsigned posted = 0;

	fail_if(!source || !target, "a region");
	lkey = source->lkey;
	rkey = target->rkey;
	memset(from, (int)round + 1, sizeof from);
	if (what == OVERFLOW) {
		while (posted < WRITES && post(&pair, posted, lkey, rkey))
			posted++;
		for (int i = 0; i < 100 && state_of(pair.writer) != IBV_QPS_ERR; i++)
			usleep(100000);
		fail_if(state_of(pair.writer) != IBV_QPS_ERR,
			"an overflow of the completion queue did not stop the queue pair");
	} else {
		fail_if(write_repeatedly(&pair, round % 7 + 1, lkey, rkey, &posted) != 0, "Writes");
		fail_if(ibv_dereg_mr(what == TARGET ? target : source), "deregistration");
		memcpy(copy, to, sizeof to);
		memset(from, (int)round + 101, sizeof from);
		fail_if(!write_repeatedly(&pair, 100000, lkey, rkey, &posted),
			"Writes succeed after the deregistration");
		usleep(20000);
		fail_if(what == TARGET && memcmp(copy, to, sizeof to),
			"memory that was deregistered has changed");
	}
	if (what != TARGET)
		fail_if(ibv_dereg_mr(target), "deregistering the target");
	if (what != SOURCE)
		fail_if(ibv_dereg_mr(source), "deregistering the source");
	destroy(&pair);
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 4)
		return 2;
	address = (struct sockaddr_in){ .sin_family = AF_INET,
					.sin_port = htons((unsigned short)atoi(argv[2])) };
	fail_if(inet_pton(AF_INET, argv[1], &address.sin_addr) != 1, "the address");
	for (enum what what = 0; what < VARIANTS; what++) {
		for (unsigned round = 0; round < (unsigned)atoi(argv[3]); round++)
			run_round(what, round);
		printf("passed: %s, %s times\n", descriptions[what], argv[3]);
	}
	return 0;
}
