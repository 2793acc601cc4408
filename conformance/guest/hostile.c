/* Violates the rules of the rings that it shares with the driver, to check that the kernel and
 * other programs are unaffected.
 *
 * hostile ADDR PORT ENTRIES [SEED]
 *
 * Two queue pairs of this process are connected with each other. The program writes entries into
 * their rings, most of them valid, others random in one respect or entirely. It forges completion
 * flags, requests mappings without permission, and rings the doorbell, while a second thread writes
 * into the rings at any time. When a connection has ended, it creates the next, until the driver
 * has processed ENTRIES entries. A second process has its own memory and queues, and this process
 * has memory next to registered memory and deregistered memory. None of these may change.
 *
 * It ends with "hostile: N entries, ..., M connections". Exit status: 0 unless protected memory has
 * changed, or a valid step has failed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hostile.h"

#define SENDS 64u
#define RECEIVES 128u
#define COMPLETIONS 1024u
#define STEPS 64 /* at most, of a connection */

struct ring {
	char *at;
	size_t octets;
};

/* An end of a connection. */
struct end {
	struct rdma_cm_id *id;
	struct ring sends, receives;
};

static struct sockaddr_in address;
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ring completions;
static struct end ends[2];
static unsigned long entries, connections, successes, wanted;
static int victim;
/* Held while rings are created and destroyed; and whether they exist. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int connected;

static void must(int bad, const char *what)
{
	if (bad) {
		printf("failed: %s: %s\n", what, strerror(errno));
		exit(1);
	}
}

static unsigned char pattern(size_t i)
{
	return (unsigned char)(i * 7 + i / 253);
}

/* ---- protected memory ---- */

static void fill(void)
{
	for (size_t i = 0; i < ARENA * PAGE; i++)
		arena[i] = pattern(i);
}

static int may_change(size_t i)
{
	for (int r = 0; r < REGIONS; r++)
		if (regions[r].writable && i >= regions[r].at && i < regions[r].at + regions[r].len)
			return 1;
	return 0;
}

static void look(void)
{
	char answer;

	for (size_t i = 0; i < ARENA * PAGE; i++)
		if (arena[i] != pattern(i) && !may_change(i)) {
			printf("failed: octet %zu of page %zu has changed\n", i % PAGE, i / PAGE);
			exit(1);
		}
	must(write(victim, "?", 1) != 1 || read(victim, &answer, 1) != 1 || answer != '!',
	     "memory of the other process");
}

/* ---- rings ---- */

/* Finds new mappings of the driver's memory. Returns their number.
 */
static int new_rings(struct ring *found, int most)
{
	static unsigned long known[64];
	static int count;
	unsigned long seen[64];
	char line[512];
	FILE *maps = fopen("/proc/self/maps", "r");
	int now = 0, fresh = 0;

	must(!maps, "maps");
	while (fgets(line, sizeof line, maps)) {
		unsigned long from, to;
		int old = 0;
		if (!strstr(line, "uverbs") || sscanf(line, "%lx-%lx", &from, &to) != 2 ||
		    now == 64)
			continue;
		for (int i = 0; i < count; i++)
			old |= known[i] == from;
		if (!old && fresh < most)
			found[fresh++] = (struct ring){ (char *)from, to - from };
		seen[now++] = from;
	}
	fclose(maps);
	memcpy(known, seen, sizeof known);
	count = now;
	return fresh;
}

/* Fills the slots that the driver has consumed, and marks them valid. */
static void post(struct end *end)
{
	struct siw_sqe *send = (struct siw_sqe *)end->sends.at;
	struct siw_rqe *receive = (struct siw_rqe *)end->receives.at;

	for (unsigned i = 0; i < SENDS; i++)
		if (!(__atomic_load_n(&send[i].flags, __ATOMIC_ACQUIRE) & SIW_WQE_VALID)) {
			send_entry(&send[i]);
			__atomic_or_fetch(&send[i].flags, SIW_WQE_VALID, __ATOMIC_RELEASE);
			entries++;
		}
	for (unsigned i = 0; i < RECEIVES; i++)
		if (!(__atomic_load_n(&receive[i].flags, __ATOMIC_ACQUIRE) & SIW_WQE_VALID)) {
			receive_entry(&receive[i]);
			__atomic_or_fetch(&receive[i].flags, SIW_WQE_VALID, __ATOMIC_RELEASE);
			entries++;
		}
}

/* Polls completions, or forges them. */
static void poll_forged(void)
{
	struct siw_cqe *entry = (struct siw_cqe *)completions.at;
	struct siw_cq_ctrl *control = (struct siw_cq_ctrl *)(entry + COMPLETIONS);

	for (unsigned i = 0; i < COMPLETIONS; i++)
		if (__atomic_load_n(&entry[i].flags, __ATOMIC_ACQUIRE) & SIW_WQE_VALID) {
			successes += entry[i].status == SIW_WC_SUCCESS;
			__atomic_store_n(&entry[i].flags, 0, __ATOMIC_RELEASE);
			entries++;
		}
	control->flags = below(4) ? below(8) : (uint32_t)any();
	if (!below(4 * wildness))
		words(entry, COMPLETIONS * sizeof *entry);
}

/* Writes single words anywhere at any time, also while the driver reads them. */
static void *meddle(void *seed)
{
	state = (uintptr_t)seed;
	for (;;) {
		const struct ring *ring[] = { &ends[0].sends, &ends[0].receives, &ends[1].sends,
					      &ends[1].receives, &completions };
		pthread_mutex_lock(&lock);
		const struct ring *one = ring[below(5)];
		for (int i = 0; connected && i < 4 && wildness < 32; i++) {
			uint64_t *word = (uint64_t *)one->at + below((uint32_t)(one->octets / 8));
			uint64_t value = below(2) ? any() : __atomic_load_n(word,
					__ATOMIC_RELAXED) ^ (1ull << below(64));
			__atomic_store_n(word, value, __ATOMIC_RELAXED);
		}
		pthread_mutex_unlock(&lock);
		usleep(below(2000));
	}
	return NULL;
}

/* ---- calls ---- */

static void doorbell(const struct end *end)
{
	struct ib_uverbs_post_send_resp answer;
	struct {
		struct ib_uverbs_cmd_hdr header;
		struct ib_uverbs_post_send call;
	} command = {
		{ IB_USER_VERBS_CMD_POST_SEND, sizeof command / 4, sizeof answer / 4 },
		{ (uintptr_t)&answer, end->id->qp->handle, 0, 0, sizeof(struct ib_uverbs_send_wr) },
	};

	must(write(end->id->verbs->cmd_fd, &command, sizeof command) != sizeof command, "doorbell");
}

static void strange_calls(struct end *end)
{
	struct ibv_qp_attr attr = { .qp_state = below(8) };
	struct ibv_mr *mr;
	size_t len = PAGE << below(6);
	void *at;

	switch (below(6)) {
	case 0:
		at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, end->id->verbs->cmd_fd,
			  (off_t)(below(2) ? below(64) * PAGE : (any() & 0xfffffffffff) * PAGE));
		/* A key may have been guessed, but only one of this process's rings. */
		if (at != MAP_FAILED)
			munmap(at, len);
		break;
	case 1:
		at = mremap(end->sends.at, end->sends.octets, 8 * end->sends.octets,
			    MREMAP_MAYMOVE);
		must(at != MAP_FAILED, "no ring may grow");
		break;
	case 2:
		mr = ibv_reg_mr(pd, (void *)any(), below(2) ? any() : below(100000),
				IBV_ACCESS_LOCAL_WRITE);
		if (mr)
			ibv_dereg_mr(mr);
		break;
	case 3:
		mr = ibv_reg_mr(pd, arena, ARENA * PAGE, (int)any() & ~(IBV_ACCESS_ON_DEMAND |
				IBV_ACCESS_LOCAL_WRITE));
		if (mr)
			ibv_dereg_mr(mr);
		break;
	case 4:
		ibv_modify_qp(end->id->qp, &attr, IBV_QP_STATE | (int)(any() & 0x1fffff));
		break;
	default:
		attr.qp_state = IBV_QPS_ERR;
		ibv_modify_qp(end->id->qp, &attr, IBV_QP_STATE);
	}
}

/* ---- connections ---- */

static struct rdma_cm_event *next(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;

	must(rdma_get_cm_event(channel, &event), "event");
	if (event->event != type) {
		printf("failed: %s (%d) instead of %s\n", rdma_event_str(event->event),
		       event->status, rdma_event_str(type));
		exit(1);
	}
	return event;
}

static void expect(enum rdma_cm_event_type type)
{
	rdma_ack_cm_event(next(type));
}

static void make_queues(struct end *end)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { SENDS, RECEIVES, SIW_MAX_SGE, SIW_MAX_SGE, 64 } };
	struct ring found[2];

	must(rdma_create_qp(end->id, pd, &attr), "queue pair");
	must(new_rings(found, 2) != 2, "rings");
	/* Both ends differ in size. */
	int larger = found[1].octets > found[0].octets;
	end->receives = found[larger];
	end->sends = found[!larger];
}

static void set_connected(int value)
{
	pthread_mutex_lock(&lock);
	connected = value;
	pthread_mutex_unlock(&lock);
}

static void connect_ends(void)
{
	struct rdma_conn_param param = { .responder_resources = 16, .initiator_depth = 16 };
	struct rdma_cm_event *event;

	/* Each connection has its own completion queue, because an overflow makes it unusable. */
	must(!(cq = ibv_create_cq(listener->verbs, COMPLETIONS, NULL, NULL, 0)),
	     "completion queue");
	must(new_rings(&completions, 1) != 1, "ring");
	must(rdma_create_id(channel, &ends[0].id, NULL, RDMA_PS_TCP), "id");
	must(rdma_resolve_addr(ends[0].id, NULL, (struct sockaddr *)&address, 3000), "resolve");
	expect(RDMA_CM_EVENT_ADDR_RESOLVED);
	must(rdma_resolve_route(ends[0].id, 3000), "route");
	expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
	make_queues(&ends[0]);
	must(rdma_connect(ends[0].id, &param), "connect");
	event = next(RDMA_CM_EVENT_CONNECT_REQUEST);
	ends[1].id = event->id;
	make_queues(&ends[1]);
	must(rdma_accept(ends[1].id, &param), "accept");
	rdma_ack_cm_event(event);
	expect(RDMA_CM_EVENT_ESTABLISHED);
	expect(RDMA_CM_EVENT_ESTABLISHED);
	set_connected(1);
	connections++;
}

static void disconnect_ends(void)
{
	set_connected(0);
	for (int i = 0; i < 2; i++) {
		if (below(2))
			rdma_disconnect(ends[i].id);
		rdma_destroy_qp(ends[i].id);
		must(rdma_destroy_id(ends[i].id), "end of a connection");
	}
	must(ibv_destroy_cq(cq), "end of the completion queue");
	new_rings(NULL, 0);
}

static void register_region(struct region *region)
{
	region->mr = ibv_reg_mr(pd, arena + region->at, region->len, region->access);
	must(!region->mr, "region");
}

/*
 * Deregisters a region, whose memory may not change afterwards. The driver may refuse while a
 * connection uses the region, but not the last time.
 */
static void end_region(struct region *region, int last)
{
	int error = ibv_dereg_mr(region->mr);

	if (error == EBUSY && !last)
		return;
	must(error, "deregistration");
	region->mr = NULL;
	region->writable = 0;
	for (size_t i = region->at; i < region->at + region->len; i++)
		arena[i] = pattern(i);
}

static int in_error(const struct end *end)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	must(ibv_query_qp(end->id->qp, &attr, IBV_QP_STATE, &init), "state");
	return attr.qp_state == IBV_QPS_ERR;
}

static void one_connection(void)
{
	int steps = 1 + (int)below(STEPS), middle = (int)below(8), over = 0;

	wildness = 4u << below(8);
	register_region(&regions[GOING]);
	regions[GOING].writable = 1;
	connect_ends();
	for (int step = 0; step < steps; step++) {
		struct end *end = &ends[below(2)];
		post(&ends[0]);
		post(&ends[1]);
		doorbell(end);
		poll_forged();
		if (!below(wildness))
			strange_calls(end);
		if (step == middle)
			end_region(&regions[GOING], 0);
		/* In the error state everything is flushed, which soon tests nothing new. A new
		 * connection takes as long as a thousand entries. */
		if (!over && in_error(end)) {
			over = 1;
			steps = step + (int)below(16);
		}
	}
	disconnect_ends();
	if (regions[GOING].mr)
		end_region(&regions[GOING], 1);
	look();
}

/* ---- the second process, and main ---- */

static void be_victim(struct ibv_context *verbs, int socket)
{
	struct ibv_pd *own = ibv_alloc_pd(verbs);
	struct ibv_cq *queue = ibv_create_cq(verbs, 64, NULL, NULL, 0);
	struct ibv_qp_init_attr attr = { .send_cq = queue, .recv_cq = queue, .qp_type = IBV_QPT_RC,
					 .cap = { 16, 16, 1, 1, 0 } };
	struct ibv_mr *mr = ibv_reg_mr(own, arena, ARENA * PAGE, IBV_ACCESS_LOCAL_WRITE |
				       IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	struct ring found[3];
	char command;

	must(!mr || !ibv_create_qp(own, &attr) || new_rings(found, 3) != 3, "the other process");
	must(write(socket, &mr->rkey, 4) != 4, "pipe");
	while (read(socket, &command, 1) == 1) {
		size_t changed = 0;
		for (size_t i = 0; i < ARENA * PAGE; i++)
			changed += arena[i] != pattern(i);
		/* The control word of the completion queue belongs to the provider and is zero. */
		for (int r = 0; r < 3; r++)
			for (size_t i = 0; i < found[r].octets; i++)
				changed += found[r].at[i] != 0;
		must(write(socket, changed ? "X" : "!", 1) != 1, "answer");
	}
	_exit(0);
}

/* Opens the device at the address for this process. */
static struct ibv_context *open_device(void)
{
	struct sockaddr_in at = address;
	struct rdma_cm_id *id;

	at.sin_port = 0;
	must(!(channel = rdma_create_event_channel()), "event channel");
	must(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "id");
	must(rdma_bind_addr(id, (struct sockaddr *)&at), "bind");
	return id->verbs;
}

static void start_victim(void)
{
	int pair[2];

	must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "socket pair");
	if (!fork()) {
		close(pair[0]);
		be_victim(open_device(), pair[1]);
	}
	close(pair[1]);
	victim = pair[0];
	victim_address = (uintptr_t)arena;
	must(read(victim, &victim_stag, 4) != 4, "the other process");
}

int main(int argc, char **argv)
{
	pthread_t thread;
	uint64_t seed = argc > 4 ? strtoull(argv[4], NULL, 0) : 1;

	if (argc < 4 || !inet_aton(argv[1], &address.sin_addr))
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	address.sin_family = AF_INET;
	address.sin_port = htons((uint16_t)atoi(argv[2]));
	wanted = strtoul(argv[3], NULL, 0);
	state = seed * 0x9e3779b97f4a7c15 + 1;
	arena = mmap(NULL, ARENA * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
		     0);
	must(arena == MAP_FAILED, "memory");
	fill();
	start_victim();
	must(!(channel = rdma_create_event_channel()), "event channel");
	must(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "id");
	must(rdma_bind_addr(listener, (struct sockaddr *)&address), "bind");
	must(rdma_listen(listener, 8), "listen");
	must(!(pd = ibv_alloc_pd(listener->verbs)), "protection domain");
	register_region(&regions[OPEN]);
	register_region(&regions[QUIET]);
	must(pthread_create(&thread, NULL, meddle, (void *)(uintptr_t)(seed + 1000)), "thread");
	while (entries < wanted)
		one_connection();
	printf("hostile: %lu entries, %lu completed well, %lu connections\n", entries, successes,
	       connections);
	return 0;
}
