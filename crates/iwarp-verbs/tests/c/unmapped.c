/* The program unmaps, protects or truncates registered memory: the access fails, but the process
 * and its other connections continue. The second argument selects the program's handlers for
 * SIGSEGV and SIGBUS. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { LARGE = 65536, SMALL = 64, SOON_MS = 20000 };

struct end {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

struct pair {
	struct end a, b;
};

enum way { UNMAP, PROTECT, TRUNCATE, READ_ONLY, WAYS };

struct memory {
	enum way way;
	int file;
	char *at;
	struct ibv_mr *mr;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static union ibv_gid gid;
static char *buffer;

/* Where mappings are made: far from the kernel's choices, so that the addresses are not reused. */
static char *next_place = (char *)0x7ea000000000;

static struct end make(enum ibv_qp_type type)
{
	struct end e = { .cq = ibv_create_cq(context, 64, NULL, NULL, 0) };
	struct ibv_qp_init_attr attr = {
		.send_cq = e.cq,
		.recv_cq = e.cq,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2 },
		.qp_type = type, .sq_sig_all = 1,
	};

	NEED(e.cq);
	e.qp = ibv_create_qp(pd, &attr);
	NEED(e.qp);
	return e;
}

static void connect_to(struct end *e, const struct end *peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	};

	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = peer->qp->qp_num;
	attr.max_dest_rd_atomic = 4;
	attr.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1,
		.grh = { .dgid = gid, .hop_limit = 1 } };
	CODE(0, ibv_modify_qp(e->qp, &attr,
			      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	/* 17 s in all: threads may be delayed on a loaded machine. */
	attr.timeout = 19;
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = 4;
	CODE(0, ibv_modify_qp(e->qp, &attr,
			      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				      IBV_QP_MAX_QP_RD_ATOMIC));
}

static struct pair make_pair(void)
{
	struct pair p = { make(IBV_QPT_RC), make(IBV_QPT_RC) };

	connect_to(&p.a, &p.b);
	connect_to(&p.b, &p.a);
	return p;
}

static void unmake(struct pair *p)
{
	struct end *ends[] = { &p->a, &p->b };

	for (int i = 0; i < 2; i++) {
		CODE(0, ibv_destroy_qp(ends[i]->qp));
		CODE(0, ibv_destroy_cq(ends[i]->cq));
	}
}

static enum ibv_wc_status next(struct end *e)
{
	struct ibv_wc wc = { 0 };

	for (int left = SOON_MS; left > 0; left--) {
		int n = ibv_poll_cq(e->cq, 1, &wc);

		NEED(n >= 0);
		if (n)
			return wc.status;
		usleep(1000);
	}
	NEED(!"a completion came in time");
	exit(2);
}

static void post(struct end *e, enum ibv_wr_opcode opcode, char *at, uint32_t len, uint32_t lkey,
	char *to, uint32_t rkey)
{
	struct ibv_sge sge = { (uintptr_t)at, len, lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)to;
	wr.wr.rdma.rkey = rkey;
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = (uintptr_t)to;
		wr.wr.atomic.compare_add = 1;
		wr.wr.atomic.rkey = rkey;
	}
	NEED(ibv_post_send(e->qp, &wr, &bad) == 0);
}

static void receive(struct end *e, char *at, uint32_t len, uint32_t lkey)
{
	struct ibv_sge sge = { (uintptr_t)at, len, lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	NEED(ibv_post_recv(e->qp, &wr, &bad) == 0);
}

static struct memory map(enum way way)
{
	struct memory m = { .way = way, .file = -1 };
	int flags = MAP_FIXED_NOREPLACE, all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
						IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

	if (way == TRUNCATE) {
		m.file = memfd_create("unmapped", 0);
		NEED(m.file >= 0 && ftruncate(m.file, LARGE) == 0);
	}
	flags |= way == TRUNCATE ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
	m.at = mmap(next_place, LARGE, PROT_READ | PROT_WRITE, flags, m.file, 0);
	NEED(m.at == next_place);
	next_place += 2 * LARGE;
	memset(m.at, 'm', LARGE);
	m.mr = ibv_reg_mr(pd, m.at, LARGE, all);
	NEED(m.mr);
	return m;
}

/* Makes the memory inaccessible; with `part` its first page stays. */
static void lose(struct memory *m, int part)
{
	size_t kept = part ? (size_t)getpagesize() : 0;

	switch (m->way) {
	case UNMAP:
		NEED(munmap(m->at + kept, LARGE - kept) == 0);
		break;
	case PROTECT:
		NEED(mprotect(m->at + kept, LARGE - kept, PROT_NONE) == 0);
		break;
	case TRUNCATE:
		NEED(ftruncate(m->file, (off_t)kept) == 0);
		break;
	default:
		NEED(mprotect(m->at + kept, LARGE - kept, PROT_READ) == 0);
	}
}

static void drop(struct memory *m)
{
	CODE(0, ibv_dereg_mr(m->mr));
	munmap(m->at, LARGE);
	if (m->file >= 0)
		close(m->file);
}

static void goes_on(struct pair *other)
{
	static char octet;

	buffer[0] = ++octet;
	receive(&other->b, buffer + LARGE, SMALL, mr->lkey);
	post(&other->a, IBV_WR_SEND, buffer, SMALL, mr->lkey, NULL, 0);
	CODE(IBV_WC_SUCCESS, next(&other->a));
	CODE(IBV_WC_SUCCESS, next(&other->b));
	CHECK(buffer[LARGE] == octet);
	buffer[0] = ++octet;
	post(&other->b, IBV_WR_RDMA_WRITE, buffer, LARGE, mr->lkey, buffer + LARGE, mr->rkey);
	CODE(IBV_WC_SUCCESS, next(&other->b));
	CHECK(buffer[LARGE] == octet);
}

enum role { SOURCE_OF_READ, TARGET_OF_WRITE, WORD, SOURCE_OF_SEND, SOURCE_OF_WRITE, RECEIVE,
	SINK_OF_READ, ROLES };

/* One access of each kind to inaccessible memory. */
static void try(enum role role, struct memory *m, uint32_t len, int part)
{
	struct pair p = make_pair();
	char *at = m->at, *own = buffer;
	enum ibv_wc_status here = IBV_WC_REM_ACCESS_ERR;
	int failed = failures;

	/* With `part`, large accesses begin in accessible memory. */
	if (part && len == SMALL)
		at += LARGE - SMALL;
	if (role == RECEIVE)
		receive(&p.b, at, len, m->mr->lkey);
	if (role == SOURCE_OF_SEND)
		receive(&p.b, own, LARGE, mr->lkey);
	lose(m, part);
	switch (role) {
	case SOURCE_OF_READ:
		post(&p.a, IBV_WR_RDMA_READ, own, len, mr->lkey, at, m->mr->rkey);
		break;
	case TARGET_OF_WRITE:
		post(&p.a, IBV_WR_RDMA_WRITE, own, len, mr->lkey, at, m->mr->rkey);
		break;
	case WORD:
		post(&p.a, IBV_WR_ATOMIC_FETCH_AND_ADD, own, 8, mr->lkey, m->at + LARGE - 8, m->mr->rkey);
		break;
	case SOURCE_OF_SEND:
		post(&p.a, IBV_WR_SEND, at, len, m->mr->lkey, NULL, 0);
		here = IBV_WC_LOC_PROT_ERR;
		break;
	case SOURCE_OF_WRITE:
		post(&p.a, IBV_WR_RDMA_WRITE, at, len, m->mr->lkey, own, mr->rkey);
		here = IBV_WC_LOC_PROT_ERR;
		break;
	case RECEIVE:
		post(&p.a, IBV_WR_SEND, own, len, mr->lkey, NULL, 0);
		CODE(IBV_WC_LOC_PROT_ERR, next(&p.b));
		here = IBV_WC_REM_OP_ERR;
		break;
	default:
		post(&p.a, IBV_WR_RDMA_READ, at, len, m->mr->lkey, own, mr->rkey);
		here = IBV_WC_LOC_PROT_ERR;
	}
	CODE(here, next(&p.a));
	if (failures != failed)
		fprintf(stderr, "role %d, way %d, %u octets, part %d\n", role, m->way, len, part);
	unmake(&p);
}

static int only_writes(enum role role)
{
	return role == TARGET_OF_WRITE || role == WORD || role == RECEIVE || role == SINK_OF_READ;
}

static void begin_datagrams(struct end *e)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7 };

	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	CODE(0, ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static void try_datagram(enum way way, int receives)
{
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 1 } };
	struct pair p = { make(IBV_QPT_UD), make(IBV_QPT_UD) };
	struct memory m = map(way);
	struct ibv_sge sge = { (uintptr_t)m.at, SMALL, m.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	begin_datagrams(&p.a);
	begin_datagrams(&p.b);
	wr.wr.ud.ah = ibv_create_ah(pd, &to);
	wr.wr.ud.remote_qpn = p.b.qp->qp_num;
	wr.wr.ud.remote_qkey = 7;
	NEED(wr.wr.ud.ah);
	if (receives) {
		receive(&p.b, m.at, LARGE, m.mr->lkey);
		sge = (struct ibv_sge){ (uintptr_t)buffer, SMALL, mr->lkey };
	}
	lose(&m, 0);
	CODE(0, ibv_post_send(p.a.qp, &wr, &bad));
	CODE(receives ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR, next(&p.a));
	if (receives)
		CODE(IBV_WC_LOC_PROT_ERR, next(&p.b));
	CODE(0, ibv_destroy_ah(wr.wr.ud.ah));
	unmake(&p);
	drop(&m);
}

static void try_all(struct pair *other)
{
	for (int way = 0; way < WAYS; way++) {
		if (way != READ_ONLY)
			try_datagram(way, 0);
		try_datagram(way, 1);
	}
	for (int role = 0; role < ROLES; role++)
		for (int way = 0; way < WAYS; way++)
			for (int kind = 0; kind < 4; kind++) {
				struct memory m;

				if (way == READ_ONLY && !only_writes(role))
					continue;
				m = map(way);
				try(role, &m, kind & 1 ? LARGE : SMALL, kind >> 1);
				drop(&m);
				goes_on(other);
			}
}

/* Registration checks the whole range. */
static void refuse(void)
{
	int file = memfd_create("short", 0), rights = IBV_ACCESS_LOCAL_WRITE, page = getpagesize();
	char *at;

	NEED(file >= 0 && ftruncate(file, 2 * page + 1) == 0);
	at = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	NEED(at != MAP_FAILED);
	IS_NULL(EFAULT, ibv_reg_mr(pd, at, 4 * page, rights));
	IS_NULL(EFAULT, ibv_reg_mr(pd, at + 3 * page, 1, rights));
	for (int pages = 1; pages <= 3; pages++) {
		struct ibv_mr *good = ibv_reg_mr(pd, at, pages * page, rights);

		CHECK(good != NULL);
		if (good)
			CODE(0, ibv_dereg_mr(good));
	}
	NEED(mprotect(at, page, PROT_READ) == 0);
	IS_NULL(EFAULT, ibv_reg_mr(pd, at, 2 * page, rights));
	NEED(mprotect(at, page, PROT_NONE) == 0);
	IS_NULL(EFAULT, ibv_reg_mr(pd, at, 2 * page, 0));
	NEED(munmap(at, page) == 0);
	IS_NULL(EFAULT, ibv_reg_mr(pd, at, 2 * page, 0));
	NEED(munmap(at + page, 3 * page) == 0);
	close(file);
}

static sigjmp_buf back;
static volatile sig_atomic_t calls, signal_seen, on_stack;
static void *volatile address;
static char *stack;
static struct sigaction older[2];

static int is_on_stack(const void *local)
{
	return stack && (const char *)local >= stack && (const char *)local < stack + 4 * SIGSTKSZ;
}

static void with_info(int signal, siginfo_t *info, void *own)
{
	char local = 0;

	(void)own;
	calls++;
	signal_seen = signal;
	address = info->si_addr;
	on_stack = is_on_stack(&local);
	siglongjmp(back, 1);
}

static void without_info(int signal)
{
	char local = 0;

	calls++;
	signal_seen = signal;
	on_stack = is_on_stack(&local);
	siglongjmp(back, 1);
}

/* Calls the previous handler, as crash reporters do. */
static void chaining(int signal, siginfo_t *info, void *own)
{
	const struct sigaction *old = &older[signal == SIGBUS];

	calls++;
	if (old->sa_flags & SA_SIGINFO)
		old->sa_sigaction(signal, info, own);
	else
		_exit(3);
}

static void install(int flags, void (*handler)(int, siginfo_t *, void *), void (*simple)(int))
{
	struct sigaction action = { .sa_flags = flags };

	sigaddset(&action.sa_mask, SIGUSR1);
	if (flags & SA_SIGINFO)
		action.sa_sigaction = handler;
	else
		action.sa_handler = simple;
	NEED(sigaction(SIGSEGV, &action, &older[0]) == 0 && sigaction(SIGBUS, &action, &older[1]) == 0);
}

static void give_stack(void)
{
	stack_t alternate = { .ss_size = 4 * SIGSTKSZ };

	stack = malloc(alternate.ss_size);
	alternate.ss_sp = stack;
	NEED(stack && sigaltstack(&alternate, NULL) == 0);
}

/* The program's own faults reach its handler, with the address and on the right stack. */
static void own_faults(int flags)
{
	char *page = mmap(NULL, 2, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int before = calls;

	NEED(page != MAP_FAILED);
	address = NULL;
	if (sigsetjmp(back, 1) == 0) {
		*(volatile char *)(page + 1) = 1;
		CHECK(!"the write has failed");
	}
	CHECK(calls == before + 1 && signal_seen == SIGSEGV);
	CHECK(!(flags & SA_SIGINFO) || address == page + 1);
	CHECK(on_stack == ((flags & SA_ONSTACK) != 0));
	munmap(page, 2);
}

/* A signal sent by a process also reaches the handler. */
static void sent_signals(void)
{
	int before = calls;

	if (sigsetjmp(back, 1) == 0) {
		raise(SIGBUS);
		CHECK(!"the signal has come");
	}
	CHECK(calls == before + 1 && signal_seen == SIGBUS);
}

/* Runs `what` in a child. Returns the signal that ended it, or its exit code as a negative
 * number. */
static int end_of(void (*what)(void))
{
	int status;
	pid_t child = fork();

	NEED(child >= 0);
	if (child == 0) {
		what();
		_exit(0);
	}
	NEED(waitpid(child, &status, 0) == child);
	return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

static void fault(void)
{
	*(volatile char *)8 = 1;
}

static void send_fault(void)
{
	kill(getpid(), SIGSEGV);
}

static void send_bus_error(void)
{
	raise(SIGBUS);
}

static void *in_thread(void *other)
{
	sigset_t all;

	sigfillset(&all);
	NEED(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0);
	try_all(other);
	return NULL;
}

/* Polls the completion queue until the library has checked its handler. */
static void poll_for_handler(struct pair *p)
{
	struct ibv_wc wc;

	for (int i = 0; i < 8192; i++)
		CHECK(ibv_poll_cq(p->a.cq, 1, &wc) == 0);
}

static int flags_of(const char *mode)
{
	int flags = 0;

	if (strstr(mode, "stack"))
		flags |= SA_ONSTACK;
	if (strstr(mode, "info"))
		flags |= SA_SIGINFO;
	if (strstr(mode, "node"))
		flags |= SA_NODEFER;
	if (strstr(mode, "once"))
		flags |= SA_RESETHAND;
	return flags;
}

static struct ibv_device **open_device(void)
{
	struct ibv_device **list;

	list = ibv_get_device_list(NULL);
	NEED(list && list[0]);
	context = ibv_open_device(list[0]);
	pd = ibv_alloc_pd(context);
	buffer = calloc(2, LARGE);
	NEED(pd && buffer && ibv_query_gid(context, 1, 0, &gid) == 0);
	mr = ibv_reg_mr(pd, buffer, 2 * LARGE,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				IBV_ACCESS_REMOTE_ATOMIC);
	NEED(mr);
	return list;
}

int main(int count, char **words)
{
	const char *mode = count > 2 ? words[2] : "none";
	struct ibv_device **list;
	struct pair other;
	pthread_t thread;
	/* Another language's runtime has its own handlers and stacks. */
	int flags = flags_of(mode), before, after, runtime = strcmp(mode, "runtime") == 0;

	before = strncmp(mode, "before", 6) == 0;
	after = strncmp(mode, "after", 5) == 0;
	if (before || after)
		give_stack();
	if (before)
		install(flags, with_info, without_info);
	if (strcmp(mode, "ignored") == 0) {
		signal(SIGSEGV, SIG_IGN);
		signal(SIGBUS, SIG_IGN);
	}
	list = open_device();
	other = make_pair();
	goes_on(&other);
	refuse();
	if (after) {
		install(flags, with_info, without_info);
		poll_for_handler(&other);
	}
	if (strcmp(mode, "chain") == 0) {
		/* Twice with the library's handler in between, so that the second one's predecessor
		 * precedes the first one. */
		install(SA_SIGINFO, chaining, NULL);
		poll_for_handler(&other);
		install(SA_SIGINFO, chaining, NULL);
		poll_for_handler(&other);
	}
	if (runtime)
		try_all(&other);
	if (runtime || strcmp(mode, "blocked") == 0) {
		NEED(pthread_create(&thread, NULL, in_thread, &other) == 0);
		NEED(pthread_join(thread, NULL) == 0);
	} else {
		try_all(&other);
	}
	CHECK(calls == 0);
	if (before || after) {
		own_faults(flags);
		sent_signals();
		if (flags & SA_RESETHAND) {
			CODE(SIGSEGV, end_of(fault));
			CODE(SIGBUS, end_of(send_bus_error));
		} else {
			own_faults(flags);
			sent_signals();
		}
		before = calls;
		try_all(&other);
		CHECK(calls == before);
	} else if (!runtime) {
		CODE(SIGSEGV, end_of(fault));
		CODE(strcmp(mode, "ignored") ? SIGSEGV : 0, end_of(send_fault));
		CODE(strcmp(mode, "ignored") ? SIGBUS : 0, end_of(send_bus_error));
	}
	unmake(&other);
	CODE(0, ibv_dereg_mr(mr));
	CODE(0, ibv_dealloc_pd(pd));
	CODE(0, ibv_close_device(context));
	ibv_free_device_list(list);
	free(buffer);
	return result();
}
