/* Page faults in registered memory that are never served (userfaultfd(2)). The connection whose
 * peer accesses the memory waits. All others continue, and the process can still register memory
 * once the fault ends. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "connection.h"

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif

enum { PAGES = 1 << 16, ROUNDS = 20 };

struct note {
	int port;
	uint32_t rkey;
	uint64_t addr;
};

static int faults = -1;

static void tell(int to, struct note note)
{
	NEED(write(to, &note, sizeof(note)) == sizeof(note));
}

static struct note hear(int from)
{
	struct note note;

	NEED(read(from, &note, sizeof(note)) == sizeof(note));
	return note;
}

static void wait_for_fault(void)
{
	struct pollfd set = { faults, POLLIN, 0 };
	struct uffd_msg message;

	NEED(poll(&set, 1, 30000) == 1);
	NEED(read(faults, &message, sizeof(message)) == sizeof(message) &&
		message.event == UFFD_EVENT_PAGEFAULT);
}

static void end_fault(void *pages)
{
	struct uffdio_zeropage range = { .range = { (uintptr_t)pages, PAGES } };

	NEED(ioctl(faults, UFFDIO_ZEROPAGE, &range) == 0);
}

static void *pages_without_server(void)
{
	void *pages = mmap(NULL, PAGES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_register range = { .range = { (uintptr_t)pages, PAGES },
		.mode = UFFDIO_REGISTER_MODE_MISSING };

	NEED(pages != MAP_FAILED && ioctl(faults, UFFDIO_REGISTER, &range) == 0);
	return pages;
}

static void *registers(void *p)
{
	struct peer *peer = p;
	struct ibv_mr *mr = ibv_reg_mr(peer->pd, peer->buffer, sizeof(peer->buffer),
		IBV_ACCESS_LOCAL_WRITE);

	NEED(mr && ibv_dereg_mr(mr) == 0);
	return NULL;
}

/* A peer's Write hangs. */
static void serve(int to, int from)
{
	static struct peer stuck, good;
	struct note note = { .port = listen_on_free_port(&stuck) };
	pthread_t thread;
	struct ibv_mr *mr;
	void *pages;
	char octet;

	tell(to, note);
	accept_connection(&stuck);
	/* Registering accesses the pages, so they become inaccessible afterwards. */
	pages = pages_without_server();
	end_fault(pages);
	mr = ibv_reg_mr(stuck.pd, pages, PAGES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	NEED(mr && madvise(pages, PAGES, MADV_DONTNEED) == 0);
	note = (struct note){ listen_on_free_port(&good), mr->rkey, (uintptr_t)pages };
	tell(to, note);
	accept_connection(&good);
	wait_for_fault();
	/* A thread that waits to change the memory table must not block the others. */
	NEED(pthread_create(&thread, NULL, registers, &stuck) == 0);
	note.port = 0;
	tell(to, note);
	for (int i = 0; i < ROUNDS; i++)
		exchange_words(&good, "pong", "ping");
	NEED(read(from, &octet, 1) == 1);
	end_fault(pages);
	NEED(pthread_join(thread, NULL) == 0);
	/* The Write is placed, and the connection works: the following Send arrives. */
	CODE(1, (int)next_completion(&stuck).wr_id);
	CHECK(strcmp(pages, "written") == 0);
	_exit(failures != 0);
}

int main(void)
{
	static struct peer stuck, good;
	struct ibv_send_wr wr = { .wr_id = 2, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED }, *bad;
	struct uffdio_api api = { .api = UFFD_API };
	int up[2], down[2], status = 0;
	struct ibv_sge sge;
	struct note note;
	pid_t child;

	faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	if (faults < 0) {
		fprintf(stderr, "skipped: userfaultfd: %s\n", strerror(errno));
		return result();
	}
	NEED(pipe(up) == 0 && pipe(down) == 0);
	child = fork();
	NEED(child >= 0);
	if (child == 0) {
		alarm(50);
		/* For this process's own memory. */
		close(faults);
		faults = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
		NEED(faults >= 0 && ioctl(faults, UFFDIO_API, &api) == 0);
		serve(up[1], down[0]);
	}
	alarm(50);
	connect_to_port(&stuck, hear(up[0]).port);
	note = hear(up[0]);
	connect_to_port(&good, note.port);
	snprintf(stuck.buffer + 2048, 64, "written");
	sge = (struct ibv_sge){ (uintptr_t)stuck.buffer + 2048, 64, stuck.mr->lkey };
	wr.sg_list = &sge;
	wr.wr.rdma.remote_addr = note.addr;
	wr.wr.rdma.rkey = note.rkey;
	NEED(ibv_post_send(stuck.id->qp, &wr, &bad) == 0);
	hear(up[0]);
	for (int i = 0; i < ROUNDS; i++)
		exchange_words(&good, "ping", "pong");
	CODE(2, (int)next_completion(&stuck).wr_id);
	send_word(&stuck, "behind");
	NEED(write(down[1], "e", 1) == 1);
	NEED(waitpid(child, &status, 0) == child);
	CODE(0, status);
	return result();
}
