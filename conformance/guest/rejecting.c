/* Rejects connections while the way back to the peer is missing.
 *
 * rejecting ADDR PORT COUNT BEFORE AFTER
 *
 * Listens, and rejects COUNT requests. Runs the command BEFORE in front of each reject, and AFTER
 * behind it, when the connection's socket is closed. If TCP does not send the lost reply again, the
 * peer never gets it. Exit status: 0 if all requests were rejected.
 */
#include "pair.h"

static void run(const char *command)
{
	fail_if(system(command) != 0, command);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener;

	if (argc != 6 || inet_pton(AF_INET, argv[1], &address.sin_addr) != 1) {
		fprintf(stderr, "usage: rejecting ADDR PORT COUNT BEFORE AFTER\n");
		return 2;
	}
	address.sin_port = htons(atoi(argv[2]));
	channel = rdma_create_event_channel();
	listener = listen_at(channel, &address, 8);
	for (int i = 0; i < atoi(argv[3]); i++) {
		struct rdma_cm_id *id = event(channel, RDMA_CM_EVENT_CONNECT_REQUEST);

		run(argv[4]);
		fail_if(rdma_reject(id, "no", 2), "reject");
		fail_if(rdma_destroy_id(id), "destroying the identifier");
		run(argv[5]);
	}
	fail_if(rdma_destroy_id(listener), "destroying the listener");
	rdma_destroy_event_channel(channel);
	return 0;
}
