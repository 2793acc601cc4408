/* Deregisters memory while a peer writes into it or sends from it, and overflows completion queues.
 *
 * revoking ADDR PORT ROUNDS
 *
 * In each round, two queue pairs of this process are connected with each other, and one
 * continuously writes into memory of the other. Then the target or the source of the Writes is
 * deregistered, or completions are no longer polled. The connection must end with an error, and no
 * octet of a deregistered target may change after the call. Exit status: 0 if all checks pass.
 */
#include "pair.h"

#define WRITES 32
#define OCTETS (64 * 1024)

enum what { TARGET, SOURCE, QUEUE, WHATS };
static const char *const whats[WHATS] = { "the target is deregistered",
					  "the source is deregistered",
						  "nobody takes completions" };

static struct sockaddr_in address;
static unsigned char from[OCTETS], to[WRITES * OCTETS], copy[WRITES * OCTETS];

static struct ibv_cq *cq, *other;

/* `entries` is the size of the writer's completion queue. */
static struct pair connect_pair(int entries)
{
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { WRITES, 4, 1, 1, 0 },
					 .sq_sig_all = 1 };
	struct ibv_qp_init_attr theirs = attr;
	struct pair pair = begin_pair(&address);

	cq = ibv_create_cq(pair.writer->verbs, entries, NULL, NULL, 0);
	other = ibv_create_cq(pair.writer->verbs, 16, NULL, NULL, 0);
	must(!cq || !other, "a completion queue");
	attr.send_cq = attr.recv_cq = cq;
	theirs.send_cq = theirs.recv_cq = other;
	join_pair(&pair, attr, theirs);
	return pair;
}

static void take_apart(struct pair *pair)
{
	end_queue_pairs(pair);
	must(ibv_destroy_cq(cq) || ibv_destroy_cq(other), "the end of the completion queues");
	end_pair(pair);
}

/* Posts a Write to one of the offsets. Returns 0 if the queue is full or in error.
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

/* Writes until a completion has an error. Returns its status, or 0 after ten seconds. */
static enum ibv_wc_status write_on(struct pair *pair, unsigned turns, uint32_t lkey, uint32_t rkey,
				   unsigned *posted)
{
	struct ibv_wc wc;

	for (unsigned done = 0, idle = 0; done < turns && idle < 100000;) {
		while (*posted < WRITES && post(pair, done + *posted, lkey, rkey))
			++*posted;
		if (ibv_poll_cq(cq, 1, &wc) == 1) {
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

	must(ibv_query_qp(id->qp, &attr, IBV_QP_STATE, &init), "the state");
	return (int)attr.qp_state;
}

static void play(enum what what, unsigned round)
{
	struct pair pair = connect_pair(what == QUEUE ? 4 : 2 * WRITES);
	struct ibv_mr *source = ibv_reg_mr(pair.writer->pd, from, sizeof from,
					   IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mr *target = ibv_reg_mr(pair.target->pd, to, sizeof to, IBV_ACCESS_LOCAL_WRITE |
					   IBV_ACCESS_REMOTE_WRITE);
	uint32_t lkey, rkey;
	unsigned posted = 0;

	must(!source || !target, "a region");
	lkey = source->lkey;
	rkey = target->rkey;
	memset(from, (int)round + 1, sizeof from);
	if (what == QUEUE) {
		while (posted < WRITES && post(&pair, posted, lkey, rkey))
			posted++;
		for (int i = 0; i < 100 && state_of(pair.writer) != IBV_QPS_ERR; i++)
			usleep(100000);
		must(state_of(pair.writer) != IBV_QPS_ERR,
		     "the end of a queue pair whose completion queue has overflowed");
	} else {
		must(write_on(&pair, round % 7 + 1, lkey, rkey, &posted) != 0, "Writes");
		must(ibv_dereg_mr(what == TARGET ? target : source), "deregistration");
		memcpy(copy, to, sizeof to);
		memset(from, (int)round + 101, sizeof from);
		must(!write_on(&pair, 100000, lkey, rkey, &posted), "the error of a Write");
		usleep(20000);
		must(what == TARGET && memcmp(copy, to, sizeof to),
		     "memory that was deregistered has changed");
	}
	if (what != TARGET)
		must(ibv_dereg_mr(target), "the target");
	if (what != SOURCE)
		must(ibv_dereg_mr(source), "the source");
	take_apart(&pair);
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 4)
		return 2;
	address = (struct sockaddr_in){ .sin_family = AF_INET,
					.sin_port = htons((unsigned short)atoi(argv[2])) };
	must(inet_pton(AF_INET, argv[1], &address.sin_addr) != 1, "the address");
	for (enum what what = 0; what < WHATS; what++) {
		for (unsigned round = 0; round < (unsigned)atoi(argv[3]); round++)
			play(what, round);
		printf("passed: %s, %s times\n", whats[what], argv[3]);
	}
	return 0;
}
