// Links one library whole; that it links and loads is the test.
int main() { return 0; }
